"""`Checkpointer`: saves and loads the steps of one training run.

A step counts only if it was committed, so an incomplete save can never be loaded. A Checkpointer is composed
of parts, and no part knows it. `settings` checks the arguments and compares them between ranks. `root` has
the steps and small files about them, and `retention` removes steps. `schedule` decides when and where to
save. `saving` and `async_saving` save, into `tiers` too. `loading` and `tier_recovery` load.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeVar

from megackpt.comm import Group
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save_request import SaveRequest, save_request
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.registry import SaveChoice
from megackpt.ground.arguments import check_kind, checked_step
from megackpt.maps import MapChoice
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.plans.validation import LoadReport, ReturnsState, StrictHandling
from megackpt.run.checkpointer.async_saving import AsyncSaving
from megackpt.run.checkpointer.branches import RunBranch
from megackpt.run.checkpointer.loading import LastLoad, RootLoading, StepLoading, StepRequest, load_checkpoint
from megackpt.run.checkpointer.options import (
    Groups,
    OnError,
    OnNewerSteps,
    Retention,
    SaveSchedule,
    Tier,
    Tiers,
)
from megackpt.run.checkpointer.root import RunRoot, StepList
from megackpt.run.checkpointer.saving import (
    DirectSaving,
    RootSaving,
    SaveFailures,
    ScheduledSaving,
    StepSaving,
)
from megackpt.run.checkpointer.schedule import DestinationChoice, SaveTrigger, SignalWatch
from megackpt.run.checkpointer.settings import RunRanks, RunSettings, checked_groups
from megackpt.run.checkpointer.tier_recovery import TierLoading
from megackpt.run.checkpointer.tiers import TierSaving, TierSet
from megackpt.storage import Location, ObjectOptions, Store

log = logging.getLogger(__name__)

_SIGNAL_EXIT = 128  # a shell's exit code for a process that a signal has ended is this and the signal


Self = TypeVar("Self", bound="Checkpointer")


class Checkpointer:
    """Saves and loads numbered steps under a root, `iter_0000100` for step 100.

    Saving, loading, finding and `should_save` are collective over the group. A step that is not committed is
    never loaded. After the commit of this step or a newer one, the files of incomplete saves are removed.

    All ranks must pass equal arguments. In the first collective call ranks compare their arguments. If they
    differ, all ranks raise the same `DeclarationError`.

    Args:
        root: a directory, the URL of one in an object store, `s3://bucket/run`, or any `Store`. Each rank
            passes its own `Store` for the same files. With async_save it must be picklable, and
            its copy in another process must access the same files.
        keep_last: the number of newest steps that stay; short for `Retention(keep_last=...)`. None: all stay.
        retention: which steps stay. Others are removed once a newer step is committed.
        save_interval: the number of steps between saves; short for `SaveSchedule(steps=...)`.
        schedule: when a save is due: by steps, time and signals.
        async_save: True, or `AsyncOptions`: `save` returns as soon as the state is copied to host memory, and
            a process of each rank writes and commits it in the background, to the root and into tiers. The
            next `save`, `wait`, `poll` or `close` raises its error. The process starts with the Checkpointer.
        tiers: storage of the nodes, in which steps are also saved: a list of tiers, or `Tiers`. `load`
            then takes the newest step that is complete over tiers and root.
        on_error: what to do if the store rejects a save, or a step is damaged: `raise`, or `warn` and
            continue training.
        on_newer_steps: what a save does that does not continue the newest step, because the run has loaded
            an older one, or none: `keep` the newer steps as an abandoned branch, which no restart takes, with
            a warning; raise an `error`; or `discard` them after its commit, unless they are pinned.
        verify_after_save: read every byte of a step after its commit, each rank its share, before older steps
            are removed. A damaged step is removed instead, and the save fails.
        timeout_s: deadline of saves and loads, in seconds, instead of those in save_options and load_options.
        save_options: how to save, as for `megackpt.save`.
        load_options: how to load, as for `megackpt.load`.
        group: the ranks that save and load; None: all ranks of torch.distributed. `Groups` also
            names the ranks that spread replicated chunks, and the ranks that read for each other.
        objects: options of the object store, if the root is a URL.

    Raises:
        DeclarationError: an argument has the wrong type or is out of range.

    Attributes:
        root: the directory, or the URL as text.
        retention: which steps stay.
        schedule: when a save is due.
        tiers: storage of the nodes.
        async_save: whether `save` returns before the step is committed.
        on_error: the argument.
        on_newer_steps: the argument.
        verify_after_save: the argument.
        save_options: how steps are saved, with the deadline `timeout_s` if that is given.
        last_load: the step that the last `load` used, with a report; None before a load.
        last_report: the report on this rank's last `load` or `load_from`, as of `load_with_report`; None
            before one, and after a `load` with tiers.

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
        on_newer_steps: OnNewerSteps = "keep",
        verify_after_save: bool = False,
        timeout_s: float | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: Group | Groups | None = None,
        objects: ObjectOptions | None = None,
    ) -> None:
        check_kind("objects", objects, ObjectOptions, give="ObjectOptions(...), or None", optional=True)
        settings = RunSettings.from_arguments(
            keep_last=keep_last,
            retention=retention,
            save_interval=save_interval,
            schedule=schedule,
            async_save=async_save,
            tiers=tiers,
            on_error=on_error,
            on_newer_steps=on_newer_steps,
            verify_after_save=verify_after_save,
            timeout_s=timeout_s,
            save_options=save_options,
            load_options=load_options,
        )
        groups = checked_groups(group)
        self.retention, self.schedule, self.tiers = settings.retention, settings.schedule, settings.tiers
        self.async_save = settings.async_options is not None
        self.on_error, self.verify_after_save = settings.on_error, settings.verify_after_save
        self.on_newer_steps = settings.on_newer_steps
        self.save_options, self._load_options = settings.save_options, settings.load_options
        self.last_load: LastLoad | None = None
        self.last_report: LoadReport | None = None
        trusted = self._load_options.allow_unsafe_pickle
        self._root = RunRoot(root, objects=objects, allow_unsafe_pickle=trusted)
        self.root = self._root.path
        self._ranks = RunRanks(groups, settings, root=self._root.common_location)
        self._plans = PlanCache()
        self._failures = SaveFailures(on_error)
        tier_set = TierSet(settings.tiers)
        self._loading: StepLoading = RootLoading(
            directories=self._root.directories, options=self._load_options, exchange_group=groups.exchange
        )
        if len(tier_set):
            self._loading = TierLoading(tiers=tier_set, root=self._loading)
        self._branch = RunBranch(self._loading, settings.on_newer_steps, where=str(self.root))
        root_saving = RootSaving.from_settings(self._root.directories, settings, self._branch, self._failures)
        self._saving: StepSaving = DirectSaving(root_saving, TierSaving(tier_set, self.save_options))
        if settings.async_options is not None:
            self._saving = AsyncSaving(
                root_saving,
                tier_set,
                settings.async_options,
                objects=objects,
                store=self._root.store,
                hook=self._writer_hook,
            )
        self._signals = SignalWatch(settings.schedule.signals)
        self._trigger = SaveTrigger(settings.schedule, self._signals)
        self._scheduled_saving = ScheduledSaving(
            self._saving, DestinationChoice(settings.tiers), self._trigger, self._branch, self._failures
        )
        self._signals.start()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.error("A save has failed, too: %s", failure)  # raised here it would hide the first error

    def should_save(self, step: int) -> bool:
        """Return whether a save of this step is due; the same on all ranks.

        Collective: all ranks call it at every step, with the same step. Most calls send nothing. In the first
        collective call, ranks compare their arguments. If the schedule has seconds or signals, ranks exchange
        256 bytes about once a second.

        Raises:
            DeclarationError: ranks pass different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        group = self._ranks.group(timeout_s=self.save_options.timeout_s)
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
            make_state: returns the state to save; called only if the step is due.
            metrics: as for `save`.
            content_metadata: as for `save`.
            sharded_strategy: as for `save`.

        Returns:
            The result of `save`; False if the step is not due.

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
        """Whether a signal asks to end the run after the save; equal on all ranks after `should_save`."""
        return self._trigger.exit_signal is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code if `exit_requested`: 128 plus the signal's number, 143 for SIGTERM; else None."""
        signum = self._trigger.exit_signal
        return None if signum is None else _SIGNAL_EXIT + signum

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
        """Save a step, then remove older steps that are not kept, and files of incomplete saves. Collective.

        A step that is saved because of a signal goes to the root, for any `Tiers.root_every`. If a step was
        skipped because an earlier save was not finished, the next step goes to its destinations.

        Args:
            step: its number.
            state: the sharded state dict, as for `megackpt.save`.
            metrics: numbers that say how good the step is, for `KeepBest` and `megackpt ls`. The values of
                rank 0 are used; either all ranks pass metrics or none does.
            content_metadata: as for `megackpt.save`.
            sharded_strategy: as for `megackpt.save`, for the root; tiers have the native format.
            to_root: whether the step goes to the root; None: as `Tiers.root_every` says. Pass True for the
                last step of a run.

        Returns:
            Whether the step is saved or, with async_save, being saved. False in three cases: the save failed
            with on_error="warn"; an earlier save is not finished and `AsyncOptions.when_busy` is "skip"
            (unless `exit_requested`); neither the root nor a tier takes this step.

        Raises:
            CheckpointError: as `megackpt.save`; older steps do not change. With on_error="warn", not if the
                store rejected the save, or the step is damaged.
        """
        step = checked_step(step)
        group = self._ranks.group(timeout_s=self.save_options.timeout_s)
        destinations = self._scheduled_saving.destinations(step, to_root, group)
        request = self._request(state, content_metadata, sharded_strategy)
        equal_arguments = {"step": step, "metrics given": metrics is not None}
        request = replace(request, equal_arguments=equal_arguments)
        return self._scheduled_saving.save(step, destinations, request, metrics, group)

    def warm_up(
        self,
        state: ShardedStateDict,
        *,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
    ) -> None:
        """Prepare the first asynchronous save of a state, so that it takes no longer than others. Collective.

        Plans the save, allocates the memory for its copy, and waits for the writer processes. Writes nothing.
        Does nothing without async_save.

        Raises:
            CheckpointError: as `save` does before anything is written.
        """
        if self.async_save:
            group = self._ranks.group(timeout_s=self.save_options.timeout_s)
            self._saving.warm_up(self._request(state, content_metadata, sharded_strategy), group)

    def wait(self) -> None:
        """Wait until every save is committed or has failed. Local.

        Raises:
            CheckpointError: a save has failed; older steps are untouched. on_error decides which errors are
                raised, as for `save`.
        """
        self._saving.wait()

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is pending on this rank. Local."""
        return self._saving.is_busy

    def wait_staged(self) -> None:
        """Wait until the saved state may change. Local.

        With `AsyncOptions.stage_in_background`, call it before `optimizer.step()`. Otherwise it returns at
        once.
        """
        self._saving.wait_staged()

    def poll(self) -> bool:
        """Return whether an asynchronous save is pending on this rank. Local.

        Raises:
            CheckpointError: a save has failed; older steps do not change. on_error decides which errors are
                raised, as for `save`.
        """
        self._saving.poll()
        return self.is_saving

    @property
    def failed_saves(self) -> int:
        """The number of failed saves. Local; equal on all ranks once all of them know of the last error."""
        return self._failures.count

    def load(
        self,
        state: ShardedStateDict,
        step: int | Literal["latest"] | None = None,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
        maps: MapChoice | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> StateDict:
        """Load a step. Collective.

        "latest" and None mean the newest committed step that rank 0 finds. If the run went back to an older
        step and saved, it is the last step that it saved, and steps of the abandoned branch are not loaded.
        With tiers, it is the newest step that is complete over all nodes and the root; a damaged or
        incomplete step is skipped with a warning. Without tiers, a damaged step is skipped only with
        `LoadOptions(on_corrupt="fallback")`. If step is a number, no other step is loaded. `last_load` has
        the step that was used.

        Args:
            state: the request, as for `megackpt.load`.
            step: the number of a step, "latest" or None.
            strict: as for `megackpt.load`.
            maps: as for `megackpt.load`, for steps in another family's names.
            config: as for `megackpt.load`.

        Returns:
            The loaded state dict, as `megackpt.load`.

        Raises:
            DeclarationError: step is neither a number nor "latest".
            NotACheckpointError: there is no committed step, or the given step is not committed.
            CheckpointError: as `megackpt.load`.
        """
        if isinstance(step, str) and step != "latest":
            raise DeclarationError(f"step is {step!r}; give the number of a step, or 'latest'.")
        number = None if step is None or isinstance(step, str) else checked_step(step)
        self.wait()  # a step that is being saved is the newest, and removals after it must not cross the load
        group = self._ranks.group(timeout_s=self._load_options.timeout_s)
        request = StepRequest(state=state, strict=strict, maps=maps, config=config)
        loaded, self.last_load = self._loading.load(request, number, group)
        self.last_report = self.last_load.report
        self._trigger.loaded(self.last_load.step)
        self._branch.loaded(self.last_load)
        return loaded

    def load_from(
        self,
        state: ShardedStateDict,
        location: Location,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
        maps: MapChoice | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> StateDict:
        """Load a checkpoint that is no step of this run, to start it. Collective.

        It may be of any format, and with `maps` have another family's names, as a Hugging Face folder has.
        `last_report` has the report of this load; `last_load`, a step of this run, does not change.
        `LoadOptions.copies` are roots of this run, and are not used.

        Args:
            state: the request, as for `megackpt.load`.
            location: the checkpoint, not a root: a directory, a URL or a `Store`.
            strict: as for `megackpt.load`.
            maps: as for `megackpt.load`.
            config: as for `megackpt.load`.

        Returns:
            The loaded state dict, as `megackpt.load`.

        Raises:
            CheckpointError: as `megackpt.load`.
        """
        group = self._ranks.group(timeout_s=self._load_options.timeout_s)
        request = StepRequest(state=state, strict=strict, maps=maps, config=config)
        options, exchange = replace(self._load_options, copies=()), self._ranks.groups.exchange
        loaded, self.last_report = load_checkpoint(request, location, options, group, exchange)
        return loaded

    def find_latest(self) -> int | None:
        """Return the step that `load` would take, the same on all ranks; None if there is none. Collective.

        Waits for pending saves. Without tiers, the step is the newest committed one that rank 0 finds, of no
        abandoned branch; a newer incomplete step is a warning. With tiers, it is the newest step of which
        every byte is stored.

        Raises:
            CheckpointError: a pending save failed.
        """
        self.wait()
        return self._loading.find_latest(self._ranks.group(timeout_s=self._load_options.timeout_s))

    def location(self, step: int) -> str:
        """Return the path or URL of a step, even if the step does not exist. Local."""
        return self._root.location(step)

    def directory(self, step: int) -> Path:
        """Return the directory of a step, even if the step does not exist. Local.

        Raises:
            UnsupportedError: the root is a URL; see `location`.
        """
        return self._root.directory(step)

    def scan(self) -> StepList:
        """Return the committed and the incomplete steps. Local."""
        return self._root.scan()

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, ascending. Local."""
        return self._root.steps()

    def latest(self) -> int | None:
        """Return the newest committed step of no abandoned branch, or None. Local.

        A newer step that is incomplete is a warning.
        """
        return self._root.latest()

    def pin(self, step: int) -> None:
        """Protect a committed step from removal until `unpin`. Local: one rank calls it.

        Raises:
            NotACheckpointError: the step is not committed, or another process is removing it.
            StorageError: the pin could not be written.
        """
        self._root.pin(step)

    def unpin(self, step: int) -> None:
        """Permit the next save to remove a step again. Local: one rank calls it.

        Does nothing if the step is not pinned.
        """
        self._root.unpin(step)

    def pins(self) -> tuple[int, ...]:
        """Return the pinned steps, ascending. Local."""
        return self._root.pins()

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; an empty dict if it was saved without metrics. Local."""
        return self._root.metrics(step)

    def content_metadata(self, step: int) -> Any:
        """Return the `content_metadata` of a step. Local."""
        return self._root.content_metadata(step)

    def close(self) -> None:
        """Wait for pending saves, end the writer process, and restore the handlers of signals.

        Collective, if anything was saved asynchronously. If the schedule has signals, call it in the main
        thread. The checkpointer can be used again, but no longer handles signals.

        Raises:
            CheckpointError: a save under way failed.
        """
        try:
            self._saving.close()
        finally:
            self._signals.close()

    def _request(self, state: ShardedStateDict, content_metadata: Any, strategy: SaveChoice) -> SaveRequest:
        return save_request(
            state,
            strategy,
            options=self.save_options,
            content_metadata=content_metadata,
            plans=self._plans,
            spread_group=self._ranks.groups.spread,
        )
