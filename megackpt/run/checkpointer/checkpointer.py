"""`Checkpointer`: saves and loads the steps of one training run.

A step counts only if it was committed, so an incomplete save can never be loaded. The arguments and the saves
are in this module, what ranks do besides saving in `collective_run`, and what needs no ranks in `run`. Of the
others, `schedule` decides when and where to save, `saving`, `async_saving` and `tiers` save, `retention`
removes steps, and `loading` and `tier_recovery` load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from megackpt.comm import Group
from megackpt.engine.background.prepared_save import for_a_writer
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save_request import SaveRequest, save_request
from megackpt.entities import ShardedStateDict
from megackpt.formats.registry import SaveChoice
from megackpt.ground.arguments import check_flag, check_kind, checked_step
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.run.checkpointer.collective_run import CollectiveRun
from megackpt.run.checkpointer.options import (
    Groups,
    OnError,
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
from megackpt.run.checkpointer.settings import RunSettings
from megackpt.storage import ObjectOptions, Store

_SIGNAL_EXIT = 128  # a shell's exit code for a process that a signal has ended is this and the signal


class Checkpointer(CollectiveRun):
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
        async_options = async_options_of(async_save)
        self.async_save = async_options is not None
        self.save_options, load_options = options_of(save_options, load_options, timeout_s)
        self._plans = PlanCache()
        settings = RunSettings(
            retention=self.retention,
            schedule=self.schedule,
            async_options=async_options,
            tiers=self.tiers,
            on_error=on_error,
            verify_after_save=verify_after_save,
            save_options=self.save_options,
            load_options=load_options,
        )
        super().__init__(root, settings, groups_of(group), objects=objects, hook=self._writer_hook)
        # Nothing may fail here: the handlers of signals are set, and only `close` removes them.

    def should_save(self, step: int) -> bool:
        """Return whether a save of this step is due; the same on all ranks.

        Collective: all ranks call it at every step, with the same step. Most calls send nothing. In the first
        collective call, ranks compare their arguments. If the schedule has seconds or signals, ranks exchange
        248 bytes about once a second.

        Raises:
            DeclarationError: ranks pass different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        group = self._ranks(self.save_options.timeout_s)
        return self._parts.trigger.should_save(checked_step(step), group)

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
        return self._parts.trigger.exit_signal is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code if `exit_requested`: 128 plus the signal's number, 143 for SIGTERM; else None."""
        signum = self._parts.trigger.exit_signal
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
        group = self._ranks(self.save_options.timeout_s)
        destinations = self._parts.step_saving.destinations(step, to_root, group)
        request = self._request(state, content_metadata, sharded_strategy, group)
        equal_arguments = {"step": step, "metrics given": metrics is not None}
        request = replace(request, equal_arguments=equal_arguments)
        return self._parts.step_saving.save(step, destinations, request, metrics, group)

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
        if self._async_saving is not None:
            group = self._ranks(self.save_options.timeout_s)
            self._async_saving.warm_up(self._request(state, content_metadata, sharded_strategy, group), group)

    def _request(
        self, state: ShardedStateDict, content_metadata: Any, strategy: SaveChoice, group: Group
    ) -> SaveRequest:
        request = save_request(
            state,
            strategy,
            options=self.save_options,
            group=group,
            content_metadata=content_metadata,
            plans=self._plans,
            spread_group=self._groups.spread,
        )
        return for_a_writer(request) if self.async_save else request
