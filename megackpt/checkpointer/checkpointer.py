"""`Checkpointer`: saves and loads the steps of one training run.

A step counts only if it was committed, so an incomplete save can never be loaded. This module joins the
others of the package: `schedule` decides when and where to save, `saving`, `async_saving` and `tiers` save,
`retention` removes steps, `loading` and `tier_recovery` load, and `run` needs no ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, SupportsFloat

from megackpt.arguments import check_flag, check_kind, checked_step
from megackpt.checkpointer.async_saving import AsyncSaving
from megackpt.checkpointer.loading import LastLoad, RootLoading, StepLoading
from megackpt.checkpointer.options import (
    Groups,
    Retention,
    SaveSchedule,
    Tier,
    Tiers,
    async_options_of,
    groups_of,
    options_of,
    retention_of,
    schedule_of,
    tiers_of,
)
from megackpt.checkpointer.run import Run
from megackpt.checkpointer.saving import OnError, RootSaving, SaveFailures
from megackpt.checkpointer.schedule import DestinationChoice, SaveTrigger, SignalWatch
from megackpt.checkpointer.settings import RunSettings
from megackpt.checkpointer.step_saving import StepSaving
from megackpt.checkpointer.tiers import TierLoading, TierSaving, TierSet
from megackpt.comm import Group, world_group
from megackpt.engine.background.prepared_save import for_a_writer, pickled_for_a_writer
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save_request import SaveRequest, save_request
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.registry import SaveChoice
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.storage import ObjectOptions, Store
from megackpt.validation import ReturnsState, StrictHandling

log = logging.getLogger(__name__)

_SIGNAL_EXIT = 128  # a shell's exit code for a process that a signal has ended is this and the signal


class Checkpointer(Run):
    """Saves and loads numbered steps under a root, `iter_0000100` for step 100.

    Saving, loading, finding and `should_save` are collective over the group. A step that is not committed is
    never loaded; what an incomplete save left is removed once a step as new as it is committed.

    All ranks give equal arguments. In their first collective call they compare them, and all raise the same
    `DeclarationError` if they differ.

    Args:
        root: a directory, the URL of one in an object store, `s3://bucket/run`, or any `Store`, of which each
            rank gives its own object for the same files. With async_save a `Store` has to be picklable, and
            its copy in another process has to reach the same files.
        keep_last: the number of newest steps that stay; short for `Retention(keep_last=...)`. None: all stay.
        retention: which steps stay. Others are removed once a newer step is committed.
        save_interval: the number of steps between saves; short for `SaveSchedule(steps=...)`.
        schedule: when `should_save` and `maybe_save` save: by steps, time and signals.
        async_save: True, or `AsyncOptions`: `save` returns as soon as the state is copied to host memory, and
            a process of each rank writes and commits it in the background, to the root and into tiers. The
            next `save`, `wait`, `poll` or `close` raises its error. The process starts with the Checkpointer.
        tiers: storage of the nodes, into which newer steps go as well: a list of tiers, or `Tiers`. `load`
            then takes the newest step that is complete over tiers and root.
        on_error: what to do if the store rejects a save, or a step is found damaged: `raise`, or `warn` and
            let training go on.
        verify_after_save: read every byte of a step after its commit, each rank its share, before older steps
            are removed. A damaged step is removed instead, and the save fails.
        timeout_s: deadline of saves and loads, in seconds, instead of those in save_options and load_options.
        save_options: how to save, as for `megackpt.save`.
        load_options: how to load, as for `megackpt.load`.
        group: the ranks that save and load together; None: all ranks of torch.distributed. `Groups` also
            names those that spread replicated chunks and those that exchange what they read.
        objects: options of the object store, if the root is a URL.

    Raises:
        DeclarationError: an argument has the wrong type or is out of range.

    Attributes:
        root: the directory, or the URL as text.
        retention: which steps stay.
        schedule: when `should_save` returns True.
        tiers: storage of the nodes.
        async_save: whether `save` returns before the step is committed.
        on_error: as given.
        verify_after_save: as given.
        last_load: what the last `load` has used; None before.

    >>> with Checkpointer("ckpt", async_save=True, keep_last=3) as checkpointer:        # doctest: +SKIP
    ...     checkpointer.save(100, {"model": model.sharded_state_dict()})
    ...     state = checkpointer.load({"model": model.sharded_state_dict()})
    """

    _writer_hook: str | None = None  # for tests; see `AsyncSaving`

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
        save_interval: int | None = None,
        schedule: SaveSchedule | None = None,
        async_save: bool | AsyncOptions = False,
        tiers: Sequence[Tier] | Tiers = (),
        on_error: OnError = "raise",
        verify_after_save: bool = False,
        timeout_s: float | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: Group | Groups | None = None,
        objects: ObjectOptions | None = None,
    ) -> None:
        check_flag("verify_after_save", verify_after_save)
        check_kind("objects", objects, ObjectOptions, give="ObjectOptions(...), or None", optional=True)
        self.retention = retention_of(retention, keep_last)
        self.schedule = schedule_of(schedule, save_interval)
        self.tiers = tiers_of(tiers)
        self.on_error = on_error
        self.verify_after_save = verify_after_save
        self.last_load: LastLoad | None = None
        async_options = async_options_of(async_save)
        self.async_save = async_options is not None
        self._save_options, self._load_options = options_of(save_options, load_options, timeout_s)
        self._groups = groups_of(group)
        trusted = self._load_options.allow_unsafe_pickle
        super().__init__(root, objects=objects, allow_unsafe_pickle=trusted)
        is_path = isinstance(root, (str, os.PathLike))
        self._settings = RunSettings(
            root=self._directories.location if is_path else None,
            retention=self.retention,
            schedule=self.schedule,
            async_options=async_options,
            tiers=self.tiers,
            on_error=on_error,
            verify_after_save=verify_after_save,
            save_options=self._save_options,
            load_options=self._load_options,
        )
        self._is_compared = False
        self._plans, self._failures = PlanCache(), SaveFailures(on_error)
        tier_set = TierSet(self.tiers)
        root_saving = RootSaving.of(self._directories, self._settings, self._failures)
        self._loading: StepLoading = RootLoading(
            directories=self._directories, options=self._load_options, exchange_group=self._groups.exchange
        )
        if len(tier_set):
            self._loading = TierLoading(tiers=tier_set, root=self._loading)
        self._async_saving: AsyncSaving | None = None
        if async_options is not None:
            self._async_saving = AsyncSaving(
                root_saving,
                tier_set,
                async_options,
                objects=objects,
                store=None if is_path else pickled_for_a_writer(root),
                hook=self._writer_hook,
            )
        # Nothing after this line may fail: handlers of signals are set, and only `close` removes them.
        self._signals = SignalWatch(self.schedule.signals)
        self._trigger = SaveTrigger(self.schedule, self._signals)
        self._step_saving = StepSaving(
            root_saving=root_saving,
            tier_saving=TierSaving(tier_set, self._save_options),
            async_saving=self._async_saving,
            choice=DestinationChoice(self.tiers),
            trigger=self._trigger,
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.error("A save has failed, too: %s", failure)  # raised here it would hide the first error

    def should_save(self, step: int) -> bool:
        """Return whether the schedule asks for a save of this step; the same on all ranks.

        Collective: all ranks call it at every step, with the same step. Most calls send nothing. In the first
        collective call ranks compare their arguments; if the schedule has seconds or signals, they exchange
        248 bytes about once a second.

        Raises:
            DeclarationError: ranks ask about different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        group = self._ranks(self._save_options.timeout_s)
        return self._trigger.should_save(checked_step(step), group)

    def maybe_save(
        self,
        step: int,
        make_state: Callable[[], ShardedStateDict],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
    ) -> bool:
        """Save a step if it is due. Collective: all ranks call it at every step.

        Args:
            step: its number.
            make_state: returns what to save; called only if the step is due.
            metrics: as for `save`.
            content_metadata: as for `save`.
            sharded_strategy: as for `save`.

        Returns:
            What `save` returned; False if the step is not due.

        Raises:
            CheckpointError: as `should_save` and `save`.
        """
        return self.should_save(step) and self.save(
            step,
            make_state(),
            metrics=metrics,
            content_metadata=content_metadata,
            sharded_strategy=sharded_strategy,
        )

    @property
    def exit_requested(self) -> bool:
        """Whether a signal has asked to end after the save; the same on all ranks after `should_save`."""
        return self._trigger.exit_signal is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code if `exit_requested`: 128 plus the signal's number, 143 for SIGTERM; else None."""
        signum = self._trigger.exit_signal
        return None if signum is None else _SIGNAL_EXIT + signum

    @property
    def failed_saves(self) -> int:
        """The number of failed saves. Local; equal on all ranks once all of them know of the last error."""
        return self._failures.count

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
        to_root: bool | None = None,
    ) -> bool:
        """Save a step, then remove older steps that are not kept and what incomplete saves left. Collective.

        A step that a signal asked for goes to the root, whatever `Tiers.root_every` is. Where a step was
        skipped because an earlier save was under way, the next step goes.

        Args:
            step: its number.
            state: what to save.
            metrics: numbers that say how good the step is, for `KeepBest` and `megackpt ls`. Those of rank 0
                count; all ranks give some, or none does.
            content_metadata: as for `megackpt.save`.
            sharded_strategy: as for `megackpt.save`, for the root; tiers have the native format.
            to_root: whether the step goes to the root; None: as `Tiers.root_every` says. Give True for the
                last step of a run.

        Returns:
            Whether the step is saved or, with async_save, being saved. False if on_error="warn" and the save
            failed; with `AsyncOptions.when_busy="skip"` while an earlier save is under way (unless
            `exit_requested`); or if neither the root nor a tier takes this step.

        Raises:
            CheckpointError: as `megackpt.save`; older steps are untouched. With on_error="warn", not if the
                store rejected the save, or the step was found damaged.
        """
        step = checked_step(step)
        group = self._ranks(self._save_options.timeout_s)
        destinations = self._step_saving.destinations(step, to_root, group)
        request = self._request(state, content_metadata, sharded_strategy, group)
        equal_arguments = {"step": step, "metrics given": metrics is not None}
        request = replace(request, equal_arguments=equal_arguments)
        return self._step_saving.save(step, destinations, request, metrics, group)

    def warm_up(
        self,
        state: ShardedStateDict,
        *,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
    ) -> None:
        """Prepare the first asynchronous save of a state, so that it takes no longer than others. Collective.

        It is planned, the memory for its copy is made, and the writer processes are waited for. Nothing is
        written. Without async_save nothing is done.

        Raises:
            CheckpointError: as `save` does before anything is written.
        """
        if self._async_saving is not None:
            group = self._ranks(self._save_options.timeout_s)
            self._async_saving.warm_up(self._request(state, content_metadata, sharded_strategy, group), group)

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local.

        It returns at once, unless `AsyncOptions.stage_in_background` is set: then call it before
        `optimizer.step()`.
        """
        if self._async_saving is not None:
            self._async_saving.wait_staged()

    def poll(self) -> bool:
        """Return whether an asynchronous save is under way on this rank. Local.

        Raises:
            CheckpointError: a save has failed; older steps are untouched. on_error decides which errors are
                raised, as for `save`.
        """
        if self._async_saving is not None:
            self._async_saving.poll()
        return self.is_saving

    def _request(
        self, state: ShardedStateDict, content_metadata: Any, strategy: SaveChoice, group: Group
    ) -> SaveRequest:
        request = save_request(
            state,
            strategy,
            options=self._save_options,
            group=group,
            content_metadata=content_metadata,
            plans=self._plans,
            spread_group=self._groups.spread,
        )
        return for_a_writer(request) if self.async_save else request

    def wait(self) -> None:
        """Return when no save is under way any more: all are committed, or have failed. Local.

        Raises:
            CheckpointError: a save has failed; older steps are untouched. on_error decides which errors are
                raised, as for `save`.
        """
        if self._async_saving is not None:
            self._async_saving.wait()

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on this rank. Local."""
        return self._async_saving is not None and self._async_saving.is_busy

    def load(
        self,
        state: ShardedStateDict,
        step: int | Literal["latest"] | None = None,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> StateDict:
        """Load a step. Collective.

        "latest" and None mean the newest committed step that rank 0 finds. With tiers, it is the newest step
        that is complete over all nodes and the root: a damaged or incomplete one is skipped with a warning.
        Without tiers, a damaged step is skipped only with `LoadOptions(on_corrupt="fallback")`. A step that
        is asked for by its number is never replaced by another. `last_load` tells what was used.

        Args:
            state: what to load, as for `megackpt.load`.
            step: the number of a step, "latest" or None.
            strict: as for `megackpt.load`.

        Returns:
            The loaded state dict, as `megackpt.load`.

        Raises:
            DeclarationError: step is neither a number nor "latest".
            NotACheckpointError: there is no committed step, or not the one asked for.
            CheckpointError: as `megackpt.load`.
        """
        if isinstance(step, str) and step != "latest":
            raise DeclarationError(f"step is {step!r}; give the number of a step, or 'latest'.")
        number = None if step is None or isinstance(step, str) else checked_step(step)
        self.wait()  # a step that is being saved is the newest, and removals after it must not cross the load
        group = self._ranks(self._load_options.timeout_s)
        loaded, self.last_load = self._loading.load(state, number, strict, group)
        self._trigger.loaded(self.last_load.step)
        return loaded

    def find_latest(self) -> int | None:
        """Return the step that `load` would take, the same on all ranks; None if there is none. Collective.

        Waits for saves that are under way. Without tiers it is the newest committed step that rank 0 finds,
        and a newer incomplete step is a warning. With tiers it is the newest step of which every byte is
        stored.

        Raises:
            CheckpointError: a save under way failed.
        """
        self.wait()
        return self._loading.find_latest(self._ranks(self._load_options.timeout_s))

    def close(self) -> None:
        """Wait for saves that are under way, end the writer process, and restore the handlers of signals.

        Collective, if anything was saved asynchronously. If signals are watched, call it in the main thread.
        The checkpointer can be used again, but then watches no signals.

        Raises:
            CheckpointError: a save under way failed.
        """
        try:
            if self._async_saving is not None:
                self._async_saving.close()
        finally:
            self._signals.close()

    def _ranks(self, timeout_s: float) -> Group:
        """Return the group; at the first call compare the arguments of all ranks. Collective."""
        group = self._groups.world or world_group(timeout_s=timeout_s)
        if not self._is_compared:
            self._settings.compare(group)
            self._is_compared = True
        return group
