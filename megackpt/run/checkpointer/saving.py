"""Saving one step to its destinations, the root and the tiers; errors of saves that training tolerates."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Protocol, SupportsFloat, get_args

from megackpt.comm import Group, errors_on_all_ranks
from megackpt.engine.checkpoint.origins import FIELD
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.save import plan_save
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.saving.write import write_and_commit
from megackpt.engine.verification.collective import verify_on_all_ranks, work_after_commit
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import CheckpointError, DeclarationError, IntegrityError, StorageError, WriterFailedError
from megackpt.formats.damage import Damage
from megackpt.ground.arguments import check_flag
from megackpt.options import SaveOptions, VerifyOptions
from megackpt.run.checkpointer.branches import RunBranch
from megackpt.run.checkpointer.options import OnError
from megackpt.run.checkpointer.retention import Cleanup
from megackpt.run.checkpointer.root import checked_metrics, remove_metrics, write_metrics
from megackpt.run.checkpointer.schedule import DestinationChoice, Destinations, SaveTrigger
from megackpt.run.checkpointer.settings import RunSettings, compare_settings
from megackpt.run.checkpointer.tiers import TierSaving
from megackpt.storage import Store

log = logging.getLogger(__name__)


TOLERATED_ERRORS = (StorageError, IntegrityError, WriterFailedError)
"""Errors that on_error="warn" turns into warnings: errors of the store, and of processes that are restarted.

Other errors are raised in any case: a mistake of the caller, or an error in a user's strategy, would recur in
every later save, and the connections of a lost rank do not recover.
"""


class SaveFailures:
    """Counts failed saves, and logs or raises their errors.

    Attributes:
        count: the number of saves that have failed.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise DeclarationError(f"on_error={on_error!r} is not known. Give 'raise' or 'warn'.")
        self._on_error = on_error
        # A weak reference, since the frames of an error hold the state that was saved.
        self._last: weakref.ref[CheckpointError] | None = None
        self.count = 0

    def attempt(self, what: str, *, rank: int) -> SaveAttempt:
        """Return a context for a save that may fail; `what` names the save in the warning."""
        return SaveAttempt(self, what, rank)

    def handle(self, what: str, error: CheckpointError, *, rank: int) -> bool:
        """Count an error, only once even if it passes several blocks. Return whether it is only a warning."""
        if self._last is not None and self._last() is error:
            return False
        self._last = weakref.ref(error)
        self.count += 1
        if self._on_error == "raise":
            return False
        if rank in (0, error.rank):
            cause = error.rank if error.rank is not None else rank
            log.warning(
                "%s failed (rank %s), and training goes on without it; %s saves have failed so far. %s",
                what,
                cause,
                self.count,
                error,
                exc_info=error if rank == cause else None,
            )
        return True


class SaveAttempt:
    """A context for a save that may fail. A tolerated error ends the block and is not raised.

    Attributes:
        has_failed: whether a tolerated error ended the block.
    """

    def __init__(self, failures: SaveFailures, what: str, rank: int) -> None:
        self._failures, self._what, self._rank = failures, what, rank
        self.has_failed = False

    def __enter__(self) -> SaveAttempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        if not isinstance(error, TOLERATED_ERRORS):
            return False
        self.has_failed = self._failures.handle(self._what, error, rank=self._rank)
        return self.has_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSaving:
    """Saves steps into a root.

    Attributes:
        directories: the step directories under the root.
        cleanup: removes files after a commit or a failure.
        branch: the branch to which steps are saved.
        failures: counts failed saves.
        options: options of the saves.
        verify: how to verify every byte after a commit; None: no verification.
    """

    directories: StepDirectories
    cleanup: Cleanup
    branch: RunBranch
    failures: SaveFailures
    options: SaveOptions
    verify: VerifyOptions | None

    @classmethod
    def from_settings(
        cls,
        directories: StepDirectories,
        settings: RunSettings,
        branch: RunBranch,
        failures: SaveFailures,
    ) -> RootSaving:
        """Return what saves the steps of a run with these settings."""
        trusted = settings.load_options.allow_unsafe_pickle
        verifies = settings.verify_after_save
        return cls(
            directories=directories,
            cleanup=Cleanup(directories, settings.retention, allow_unsafe_pickle=trusted),
            branch=branch,
            failures=failures,
            options=settings.save_options,
            verify=VerifyOptions(deep=True, allow_unsafe_pickle=trusted) if verifies else None,
        )

    def save(
        self, step: int, request: SaveRequest, metrics: Mapping[str, SupportsFloat] | None, group: Group
    ) -> bool:
        """Save a step; return False if it failed with a tolerated error. Collective.

        Raises:
            CheckpointError: the same on every rank.
        """
        with self.failures.attempt(f"Saving step {step}", rank=group.rank) as attempt:
            self.store_metrics(step, metrics, group)
            store = self.directories.open(step_name(step))
            try:
                planned = plan_save(request, store, group)
            except Exception:
                store.close()
                self.clean_up(step, group)
                raise
            self._write(step, planned, store, group)
        return not attempt.has_failed

    def _write(self, step: int, planned: PlannedSave, store: Store, group: Group) -> None:
        """Write, commit and verify a step, then remove older ones. Collective."""
        damages: list[Damage] | None = None
        try:
            try:
                write_and_commit(planned, store, group)
            except Exception:
                self.clean_up(step, group)
                raise
            if self.verify is not None:
                verify = partial(verify_share, store, self.verify)
                damages = verify_on_all_ranks(group, verify, timeout_s=self.options.timeout_s)
        finally:
            store.close()

        with errors_on_all_ranks(group, work_after_commit(damages)):
            if group.rank == 0:
                self.after_commit(step, damages)

    def clean_up(self, step: int, group: Group) -> None:
        """Remove on rank 0 the files of a step whose save failed. Local."""
        if group.rank == 0:
            self.cleanup.after_failure(step)

    def after_commit(self, step: int, damages: Sequence[Damage] | None) -> None:
        """Remove what need not stay, and steps that the run discards, on rank 0. Local."""
        discard, self.branch.to_discard = self.branch.to_discard, frozenset()
        self.cleanup.after_commit(step, damages, discard=discard)

    def store_metrics(self, step: int, metrics: Mapping[str, SupportsFloat] | None, group: Group) -> None:
        """Store metrics before the commit, so that every committed step has its metrics. Collective."""
        root = self.directories.root
        if metrics is None:
            # Metrics of an earlier save of this step are removed without synchronisation with other ranks. An
            # error here is not an error of this save.
            with contextlib.suppress(OSError):
                if group.rank == 0:
                    remove_metrics(root, step)
            return
        with errors_on_all_ranks(group, "storing metrics"):
            numbers = checked_metrics(metrics)
            if group.rank == 0:
                write_metrics(root, step, numbers)


class StepSaving(Protocol):
    """Saves steps to destinations, before `save` returns or in the background."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is pending on this rank."""

    def may_save(self, group: Group, *, is_last: bool) -> bool:
        """Return whether to make the next save, after waiting for earlier ones as far as needed. Collective.

        Args:
            group: the ranks.
            is_last: whether it is the last save of a run: then the result is True.

        Raises:
            CheckpointError: an earlier save has failed, and the error is not tolerated.
        """

    def save(
        self,
        step: int,
        to: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Save a step; return whether it is saved or pending. Collective, after `may_save`.

        Raises:
            CheckpointError: the same on every rank.
        """

    def warm_up(self, request: SaveRequest, group: Group) -> None:
        """Do everything that a first save does before it copies or writes. Collective."""

    def wait_staged(self) -> None:
        """Wait until the saved state may change. Local."""

    def poll(self) -> None:
        """Raise the error of a save that has failed since the last call, unless it is tolerated. Local."""

    def wait(self) -> None:
        """Wait until no save is pending; raise errors as `poll` does. Local."""

    def close(self) -> None:
        """Wait, and release processes and memory; raise errors as `poll` does. Saves are still possible."""


class DirectSaving:
    """Saves steps before `save` returns. See `StepSaving`."""

    is_busy = False

    def __init__(self, root_saving: RootSaving, tier_saving: TierSaving) -> None:
        self._root_saving, self._tier_saving = root_saving, tier_saving

    def may_save(self, group: Group, *, is_last: bool) -> bool:
        """Return True: no earlier save is pending."""
        return True

    def save(
        self,
        step: int,
        to: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Save a step; return False if it failed with a tolerated error. Collective."""
        # Tiers come first: an error of the root must not keep the step out of them.
        is_in_tier = bool(to.tiers) and self._tier_saving.save(step, to.tiers, request, group)
        if not to.root:
            return is_in_tier
        return self._root_saving.save(step, request, metrics, group)

    def warm_up(self, request: SaveRequest, group: Group) -> None:
        """Do nothing: a synchronous save prepares itself."""

    def wait_staged(self) -> None:
        """Return at once: the state may change when `save` has returned."""

    def poll(self) -> None:
        """Return at once: `save` has raised its error itself."""

    def wait(self) -> None:
        """Return at once: no save is pending after `save`."""

    def close(self) -> None:
        """Return at once: there is neither a process nor memory to release."""


class ScheduledSaving:
    """Saves steps to the destinations that are due. All methods are collective.

    Args:
        saving: saves to destinations, before `save` returns or in the background.
        choice: chooses the destinations of each step.
        trigger: has the signals, and is notified of each save.
        branch: the branch to which steps are saved.
        failures: counts failed saves.
    """

    def __init__(
        self,
        saving: StepSaving,
        choice: DestinationChoice,
        trigger: SaveTrigger,
        branch: RunBranch,
        failures: SaveFailures,
    ) -> None:
        self._saving, self._choice, self._trigger = saving, choice, trigger
        self._branch, self._failures = branch, failures

    def destinations(self, step: int, to_root: bool | None, group: Group) -> Destinations:
        """Return the destinations of a step.

        Raises:
            DeclarationError: ranks would save it to different destinations.
        """
        destinations = self._choice.of(step, to_root=to_root, is_signalled=self._trigger.is_signalled)
        if self._choice.depends_on_step or to_root is not None:
            if to_root is not None:
                check_flag("to_root", to_root)
            values = {
                "step": step,
                "to_root": to_root,
                "is for the root": destinations.root,
                "tiers": list(destinations.tiers),
            }
            compare_settings(group, values, what="Ranks save differently", doing="choosing where a step goes")
        return destinations

    def save(
        self,
        step: int,
        destinations: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Save a step; return whether it is saved, or being saved in the background.

        Raises:
            CheckpointError: as `Checkpointer.save`.
        """
        is_last = self._trigger.exit_signal is not None
        if destinations and not self._saving.may_save(group, is_last=is_last):
            self._choice.skipped(destinations)
            return False
        self._choice.saved(destinations)
        try:
            return bool(destinations) and self._save(step, destinations, request, metrics, group)
        finally:
            self._trigger.saved(step)

    def _save(
        self,
        step: int,
        destinations: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Save a step with a record of the step that it continues."""
        if not self._branch.is_decided(step):
            self._saving.wait()  # all steps of this run are committed, and known, when rank 0 decides
        with self._failures.attempt(f"Saving step {step}", rank=group.rank) as attempt:
            origin = self._branch.origin(step, group)
        if attempt.has_failed:
            return False
        request = replace(request, commit_fields={FIELD: origin.to_json()})
        is_saved = self._saving.save(step, destinations, request, metrics, group)
        if is_saved:
            self._branch.saved(step)
        return is_saved
