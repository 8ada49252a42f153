"""Checkpointer: the steps of one training run under one directory or URL.

Owns the object that a training script holds. A step counts if it was committed: nothing else is consulted, so
a torn save can never be chosen. The modules beside it do the work: `saving` and `loading` one step, into the
run and out of it; `schedule` when to save, `retention` what stays, `failures` what training outlives;
`housekeeping` what follows a commit; `tiers` and `recovery` storage of the nodes; looking needs only a `run`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, SupportsFloat

from megackpt.api import ReturnsState, save_request
from megackpt.arguments import check_flag, checked_step
from megackpt.checkpointer.destinations import Destinations, Intervals
from megackpt.checkpointer.failures import Failures, OnError
from megackpt.checkpointer.housekeeping import Housekeeping
from megackpt.checkpointer.interval import SaveInterval, interval_of
from megackpt.checkpointer.loading import RootLoading, StepLoading, TierLoading
from megackpt.checkpointer.retention import KeepBest, RetentionPolicy
from megackpt.checkpointer.run import Run
from megackpt.checkpointer.saving import RootSaving
from megackpt.checkpointer.saving_behind import SavingBehind
from megackpt.checkpointer.schedule import Schedule
from megackpt.checkpointer.settings import RunSettings, check_given
from megackpt.checkpointer.signals import SignalWatch
from megackpt.checkpointer.survey import LastLoad
from megackpt.checkpointer.tier_saving import TierSaving
from megackpt.checkpointer.tier_set import TierSet
from megackpt.checkpointer.tiers import Tier
from megackpt.comm import AnyGroup, Group, world_group
from megackpt.engine.background.prepared_save import for_a_writer, pickled_for_a_writer
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save import SaveRequest
from megackpt.engine.saving.settings import compare_settings
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.registry import SaveChoice
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions, VerifyOptions
from megackpt.storage import ObjectOptions, Store
from megackpt.validation import StrictHandling

log = logging.getLogger(__name__)

_SIGNAL_EXIT = 128  # a shell's exit code for a process that a signal has ended is this and the signal


class Checkpointer(Run):
    """Saves and loads numbered steps under a root, `iter_0000100` for step 100.

    The root is a directory, or the URL of one in an object store, `s3://bucket/run` (then objects are the
    options for it), or any `Store`, of which each rank gives its own object for the same files.

    Saving, loading, finding and `should_save` are collective over the group. A step that is not committed is
    never loaded; what a torn save left is removed once a step as new as it is committed.

    With async_save, `save` returns as soon as the state is copied to host memory, and a process beside each
    rank writes and commits it, to the root and into tiers; the next `save`, `wait`, `poll` or `close` raises
    its error. That process is started with the Checkpointer; `async_options` are its tunables. A `Store` as
    the root is sent there: it has to be picklable, and its copy has to reach the same files.

    spread_group and exchange_group are those of `megackpt.save` and `megackpt.load`, for options that ask for
    them. timeout_s is the deadline of saves and loads, instead of the one in save_options and load_options.

    With tiers, steps also go into storage of the nodes, each tier at its own interval, and `load` takes the
    newest step that is whole over tiers and root; see docs/tiers.md. node is that of `TierSet`.

    Attributes:
        root: the directory, or the URL as text.
        keep_last: how many committed steps stay, the newest. Steps that none of keep_last, keep_every and
            keep_best asks for are removed once a newer is committed; never the newest, a pinned one, or any
            where none of the three is given.
        keep_every: steps that this number divides stay.
        keep_best: the best steps by a metric that `save` was given stay.
        save_interval: when `should_save` says yes: a number of steps, or a `SaveInterval`.
        save_on_signal: signals after which `should_save` says yes on all ranks, whichever rank received them.
            SIGUSR1 and SIGUSR2 are a wish for a save alone; after others `exit_requested` is true.
        on_error: what becomes of a save that the store refuses, or that is found damaged: `raise`, or `warn`
            and let training go on.
        verify_after_save: read every byte of a step after its commit, each rank its part, before older ones
            are removed. A damaged one is removed instead, and the save fails.
        async_save: whether `save` returns before the step is committed, also in tiers.
        every: steps that are multiples of it go to the root; others into tiers only.
        last_load: what the last `load` has used; None before.

    >>> with Checkpointer("ckpt", keep_last=3) as checkpointer:        # doctest: +SKIP
    ...     checkpointer.save(100, {"model": model.sharded_state_dict()})
    ...     state = checkpointer.load({"model": model.sharded_state_dict()})
    """

    _writer_hook: str | None = None  # for tests; see `SavingBehind`

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        save_interval: int | SaveInterval | None = None,
        save_on_signal: Iterable[int] = (),
        on_error: OnError = "raise",
        verify_after_save: bool = False,
        async_save: bool = False,
        tiers: Sequence[Tier] = (),
        every: int = 1,
        node: str | int | None = None,
        async_options: AsyncOptions | None = None,
        timeout_s: float | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: Group | None = None,
        spread_group: AnyGroup | None = None,
        exchange_group: AnyGroup | None = None,
        objects: ObjectOptions | None = None,
    ) -> None:
        check_given(
            verify_after_save=verify_after_save,
            async_save=async_save,
            async_options=async_options,
            tiers=tiers,
            every=every,
            node=node,
            save_options=save_options,
            load_options=load_options,
            group=group,
            spread_group=spread_group,
            exchange_group=exchange_group,
            objects=objects,
        )
        policy = RetentionPolicy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        interval = interval_of(save_interval)
        self.every = every
        self.last_load: LastLoad | None = None
        self.keep_last, self.keep_every, self.keep_best = keep_last, keep_every, keep_best
        self.save_interval = save_interval
        self.on_error = on_error
        self.verify_after_save = verify_after_save
        self.async_save = async_save
        self._save_options = save_options or SaveOptions()
        self._load_options = load_options or LoadOptions()
        if timeout_s is not None:
            self._save_options = replace(self._save_options, timeout_s=timeout_s)
            self._load_options = replace(self._load_options, timeout_s=timeout_s)
        trusted = self._load_options.allow_unsafe_pickle
        super().__init__(root, objects=objects, allow_unsafe_pickle=trusted)
        given = root if async_save and not isinstance(root, (str, os.PathLike)) else None
        store = None if given is None else pickled_for_a_writer(given)
        self._group = group
        self._spread_group = spread_group
        self._plans = PlanCache()
        self._failures = Failures(on_error)
        root_saving = RootSaving(
            places=self._places,
            steps=self.steps,
            housekeeping=Housekeeping(self._places, policy, allow_unsafe_pickle=trusted),
            failures=self._failures,
            options=self._save_options,
            verify=VerifyOptions(deep=True, allow_unsafe_pickle=trusted) if verify_after_save else None,
        )
        root_loading = RootLoading(
            places=self._places,
            steps=self.steps,
            latest=self.latest,
            options=self._load_options,
            exchange_group=exchange_group,
        )
        self._tiers = tier_set = TierSet(tiers, node=node)
        self._loading: StepLoading = root_loading
        if tiers:
            self._loading = TierLoading(tiers=tier_set, root=root_loading)
        self._behind: SavingBehind | None = None
        self._into_root, self._into_tiers = root_saving, TierSaving(tier_set, self._save_options)
        if async_save:
            self._behind = SavingBehind(
                root_saving,
                tier_set,
                async_options or AsyncOptions(),
                objects=objects,
                store=store,
                hook=self._writer_hook,
            )
        self._intervals = Intervals(every=every, tiers=tiers)
        self._signals = SignalWatch(save_on_signal)  # nothing after it may fail, or handlers would stay
        self.save_on_signal = self._signals.signals
        self._schedule = Schedule(interval, self._signals)
        is_path = isinstance(root, (str, os.PathLike))
        self._settings = RunSettings(
            root=self._places.location if is_path else None,
            policy=policy,
            interval=interval,
            save_on_signal=self.save_on_signal,
            on_error=on_error,
            verify_after_save=verify_after_save,
            async_save=async_save,
            async_options=async_options,
            tiers=tuple(tiers),
            every=every,
            save_options=self._save_options,
            load_options=self._load_options,
        )
        self._is_compared = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.error("A save has failed, too: %s", failure)  # what ends the block is not to be hidden

    def should_save(self, step: int) -> bool:
        """Say whether `save_interval` or a signal asks for a save of this step; the same on all ranks.

        Collective: all ranks call it at every step, with the same step. Most calls send nothing: in the first
        call of any kind ranks compare their options, and where time or signals count, they exchange 248 bytes
        about once a second.

        Raises:
            DeclarationError: ranks ask about different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        group = self._ranks(self._save_options.timeout_s)
        return self._schedule.should_save(checked_step(step), lambda: group)

    def maybe_save(
        self,
        step: int,
        make_state: Callable[[], ShardedStateDict],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
    ) -> bool:
        """Save a step if it is due; make_state is called only then. Collective, as `should_save` and `save`.

        What a signal asks for goes to the root, whatever `every` says.

        Return whether it was due, and what `save` then returned.
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
        return self._schedule.exit_signal is not None

    @property
    def exit_code(self) -> int | None:
        """What to exit with if `exit_requested`: 128 and the signal's number, 143 for SIGTERM. Else None."""
        signum = self._schedule.exit_signal
        return None if signum is None else _SIGNAL_EXIT + signum

    @property
    def failed_saves(self) -> int:
        """How many saves have failed. Local; equal on all ranks once all have met the last error."""
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
        """Save a step, then remove older steps that are not kept and what torn saves left. Collective.

        metrics are numbers that say how good the step is, for keep_best and `megackpt ls`; those of rank 0
        count, and all ranks give some or none does. to_root says whether it goes to the root, whatever
        `every` says: the last step of a run should. One that a signal asked for does. Into tiers it goes in
        the native format, whatever the root's strategy is. A step that was skipped is owed: the next one
        goes wherever that was to go.

        Return whether it is saved or, with async_save, under way: not if on_error="warn" and it has failed,
        with `AsyncOptions.when_busy="skip"` while an earlier save is under way (unless `exit_requested`), or
        if neither the root nor a tier takes this step.

        Raises:
            CheckpointError: as `megackpt.save`; older steps are untouched. With on_error="warn", not if the
                store refused, or the step was found damaged.
        """
        step = checked_step(step)
        group = self._ranks(self._save_options.timeout_s)
        going = self._intervals.of(step, to_root=to_root, is_signalled=self._schedule.is_signalled)
        if len(self._tiers) or self.every > 1 or to_root is not None:
            self._check_way(step, to_root, going, group)
        alike = {"step": step, "metrics given": metrics is not None}
        request = replace(self._request(state, content_metadata, sharded_strategy, group), alike=alike)
        behind = self._behind if going else None
        if behind is not None and not behind.may_save(group, is_last=self.exit_requested):
            self._intervals.skipped(going)
            return False
        self._intervals.served(going)
        try:
            if behind is not None:
                return behind.save(step, going, request, metrics, group)
            is_saved = bool(going.tiers) and self._into_tiers.save(step, going.tiers, request, group)
            return self._into_root.save(step, request, metrics, group) if going.root else is_saved
        finally:
            self._schedule.saved(step)

    def _check_way(self, step: int, to_root: bool | None, going: Destinations, group: Group) -> None:
        """Refuse ranks whose steps would go to different places, or nowhere. Collective."""
        if to_root is not None:
            check_flag("to_root", to_root)
        way = {"step": step, "to_root": to_root, "is for the root": going.root, "tiers": list(going.tiers)}
        compare_settings(group, way, what="Ranks save differently", doing="choosing where a step goes")

    def warm_up(
        self,
        state: ShardedStateDict,
        *,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
    ) -> None:
        """Prepare the first asynchronous save of a state, which then takes no longer than others. Collective.

        Plans for it, makes the memory for its copy and waits for the writer processes. Nothing is written;
        without async_save nothing is done.

        Raises:
            CheckpointError: as `save` does before anything is written.
        """
        if self._behind is not None:
            group = self._ranks(self._save_options.timeout_s)
            self._behind.warm_up(self._request(state, content_metadata, sharded_strategy, group), group)

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local.

        At once, unless `AsyncOptions.stage_in_background` is set: then call it before `optimizer.step()`.
        """
        if self._behind is not None:
            self._behind.wait_staged()

    def poll(self) -> bool:
        """Return whether an asynchronous save is under way on this rank. Local.

        Raises:
            CheckpointError: one has failed; older steps are untouched. As for `save`, on_error says which
                errors are raised.
        """
        if self._behind is not None:
            self._behind.poll()
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
            spread_group=self._spread_group,
        )
        return for_a_writer(request) if self.async_save else request

    def wait(self) -> None:
        """Return when the saves that are under way, if any, are committed. Local.

        Raises:
            CheckpointError: it failed; older steps are untouched. As for `save`, on_error says which errors
                are raised.
        """
        if self._behind is not None:
            self._behind.wait()

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on this rank. Local."""
        return self._behind is not None and self._behind.is_busy

    def load(
        self,
        state: ShardedStateDict,
        step: int | Literal["latest"] | None = None,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> StateDict:
        """Load a step: the newest committed one that rank 0 finds, for "latest" and None. Collective.

        With tiers, the newest that is whole over all nodes and the root; a damaged or incomplete one is
        passed over with a warning, and `last_load` says what was used. Without, that needs
        `LoadOptions(on_corrupt="fallback")`: all ranks go back together to an older step where one of them
        cannot load the newest. A step that is asked for is loaded, or not.

        Raises:
            DeclarationError: step is neither a number nor "latest".
            NotACheckpointError: there is no committed step, or not the one asked for.
            CheckpointError: as `megackpt.load`.
        """
        if isinstance(step, str) and step != "latest":
            raise DeclarationError(f"step is {step!r}; give the number of a step, or 'latest'.")
        step = step if step is None or isinstance(step, str) else checked_step(step)
        self.wait()  # a step that is under way is the newest, and its clean-up must not cross the load
        asked = None if isinstance(step, str) else step
        group = self._ranks(self._load_options.timeout_s)
        loaded, used = self._loading.load(state, asked, strict, group)
        self.last_load = used
        self._schedule.loaded(used.step)
        return loaded

    def find_latest(self) -> int | None:
        """Return the newest committed step as rank 0 sees it, so that all ranks choose the same. Collective.

        Waits for the save that is under way, if any. Warns of a newer step that is torn. With tiers, the
        newest step of which every byte is somewhere.

        Raises:
            CheckpointError: the save under way failed.
        """
        self.wait()
        return self._loading.find_latest(self._ranks(self._load_options.timeout_s))

    def close(self) -> None:
        """Wait for the save that is under way, raise its error if it failed, and let go of everything.

        Collective, if anything was saved asynchronously. In the main thread, if signals are watched: their
        handlers of before are put back. The checkpointer can be used again, but watches no signals then.
        """
        try:
            if self._behind is not None:
                self._behind.close()
        finally:
            self._signals.close()

    def _ranks(self, timeout_s: float) -> Group:
        """Return the group; at the first call compare what ranks were given. Collective."""
        group = self._group or world_group(timeout_s=timeout_s)
        if not self._is_compared:
            self._settings.compare(group)
            self._is_compared = True
        return group
