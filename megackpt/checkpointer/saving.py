"""One step on its way into the root: planned and written by the ranks; and what becomes of its errors."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, SupportsFloat, get_args

from megackpt.checkpointer.retention import Cleanup
from megackpt.checkpointer.root_files import checked_metrics, forget_metrics, write_metrics
from megackpt.comm import Group, run_on_all_ranks
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.saving.save import SaveRequest, plan_state
from megackpt.engine.saving.write import PlannedSave, write_out
from megackpt.engine.verification.collective import verify_on_all_ranks, work_after_commit
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import CheckpointError, DeclarationError, IntegrityError, StorageError, WriterFailedError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import SaveOptions, VerifyOptions
from megackpt.storage import Store

log = logging.getLogger(__name__)


OnError = Literal["raise", "warn"]

TOLERATED_ERRORS = (StorageError, IntegrityError, WriterFailedError)
"""What the store did, and processes that are started again.

Not among them: mistakes of the caller, which the next save would meet again, an error that is none of ours,
from a strategy say, in whichever process it was raised; and ranks that are lost, whose connections do not
recover.
"""


class SaveFailures:
    """A context manager around saving, to be entered again and again: counts, and raises or warns.

    rank is that of this process; rank 0, and the rank that failed, say why.

    Attributes:
        count: how many saves have failed.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise DeclarationError(f"on_error={on_error!r} is not known. Give 'raise' or 'warn'.")
        self._on_error = on_error
        self._last: weakref.ref[CheckpointError] | None = None  # not the error: its frames hold the state
        self.count = 0

    def around(self, what: str, *, rank: int) -> SaveAttempt:
        """Return a block in which a save may fail; what says which."""
        return SaveAttempt(self, what, rank)

    def take(self, what: str, error: CheckpointError, *, rank: int) -> bool:
        """Count an error, once where it passes through several blocks; say whether it is dealt with."""
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
    """A block in which a save may fail.

    Attributes:
        has_failed: whether it has, and training goes on.
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
        self.has_failed = self._failures.take(self._what, error, rank=self._rank)
        return self.has_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSaving:
    """How steps go into a root.

    Attributes:
        places: where they lie.
        steps: returns the committed ones.
        cleanup: does what follows a commit, or a failure.
        failures: counts what fails, and says which errors training outlives.
        options: of the saves.
        verify: how every byte is read again after a commit; None if it is not.
    """

    places: StepDirectories
    steps: Callable[[], Iterable[int]]
    cleanup: Cleanup
    failures: SaveFailures
    options: SaveOptions
    verify: VerifyOptions | None

    def save(
        self, step: int, request: SaveRequest, metrics: Mapping[str, SupportsFloat] | None, group: Group
    ) -> bool:
        """Save a step; return whether that has not failed. Collective.

        Raises:
            CheckpointError: the same on every rank, unless training outlives it.
        """
        self.warn_of_newer(step, group)
        with self.failures.around(f"Saving step {step}", rank=group.rank) as saving:
            self.note_metrics(step, metrics, group)
            store = self.places.open(step_name(step))
            try:
                planned, strategy = plan_state(request, store, group, self.options)
            except Exception:
                store.close()
                self.clean_up(step, group)
                raise
            self._finish(step, planned, store, strategy, group)
        return not saving.has_failed

    def _finish(
        self, step: int, planned: PlannedSave, store: Store, strategy: SaveStrategy, group: Group
    ) -> None:
        """Write and commit a step, then do what follows. Collective over the group."""
        damages: list[Damage] | None = None
        try:
            try:
                write_out(planned, store, strategy, group)
            except Exception:
                self.clean_up(step, group)
                raise
            if self.verify is not None:
                look = partial(verify_share, store, self.verify)
                damages = verify_on_all_ranks(group, look, timeout_s=self.options.timeout_s)
        finally:
            store.close()

        def follow() -> bytes:
            if group.rank == 0:
                self.cleanup.committed(step, damages)
            return b""

        run_on_all_ranks(group, follow, doing=work_after_commit(damages))

    def clean_up(self, step: int, group: Group) -> None:
        """Let go of what is beside the files of a save that failed, on rank 0. Local."""
        if group.rank == 0:
            self.cleanup.failed(step)

    def warn_of_newer(self, step: int, group: Group) -> None:
        """Say, on rank 0, that the step will not be the newest, if there is a newer one. Local."""
        newest = step
        with contextlib.suppress(OSError):  # the save will meet it, too, and tell all ranks
            newest = max(self.steps(), default=step) if group.rank == 0 else step
        if newest > step:
            log.warning(
                "Step %s is saved although step %s exists, which stays the one that is loaded and kept as "
                "newest.",
                step,
                newest,
            )

    def note_metrics(self, step: int, metrics: Mapping[str, SupportsFloat] | None, group: Group) -> None:
        """Store metrics before the commit, so that no committed step lacks its own. Collective."""
        root = self.places.root
        if metrics is None:  # whether those of an earlier save of this step are there: nobody is asked
            with contextlib.suppress(OSError):
                if group.rank == 0:
                    forget_metrics(root, step)
            return

        def note() -> bytes:
            found = checked_metrics(metrics)
            if group.rank == 0:
                write_metrics(root, step, found)
            return b""

        run_on_all_ranks(group, note, doing="storing metrics")
