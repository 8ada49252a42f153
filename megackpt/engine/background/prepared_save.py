"""An asynchronous save on its way to a writer process: its destination, what is prepared, the submitted job.

A writer process takes a planned save with its strategy pickled, its common state encoded and its rows laid
out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np

from megackpt.engine.background.messages import CheckpointLocation, Job
from megackpt.engine.background.staging_memory import RowLayout, lay_out_rows
from megackpt.engine.saving.local_state import StateRowParts
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.saving.write import CommonFiles
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import VerifyOptions

CommitHandler = Callable[[Sequence[Damage] | None], None]
"""Does what follows a commit. It is given the damage that was found in the checkpoint; None if the
checkpoint was not verified."""

FailureHandler = Callable[[Exception], bool]
"""Does what follows a failure. It returns whether the error is handled, so that it is not raised."""


def _do_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """One location to which a state is saved, and the functions to call after a commit or a failure.

    Attributes:
        request: the state, in the format for this destination.
        location: a checkpoint below a root, equal on all ranks, or the directories of a tier on the nodes.
        label: its name in messages; equal on all ranks.
        on_planned: called on every rank when all have agreed on a plan, and nothing is staged. Collective.
        on_commit: called on rank 0 after the commit, in its own thread.
        on_failure: called on every rank when the save has failed, in planning too; or `on_planned` has.
        verify: how the ranks read the committed checkpoint again; None if they do not. Not on nodes.
    """

    request: SaveRequest
    location: CheckpointLocation | NodeLocation
    label: str
    on_commit: CommitHandler
    on_failure: FailureHandler
    on_planned: Callable[[], None] = _do_nothing
    verify: VerifyOptions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSave:
    """A save that is completely planned on this rank, before its bytes are staged.

    Attributes:
        planned: the plan that all ranks have agreed on.
        parts: the bytes of the rows.
        strategy: the strategy, pickled.
        common: common state, encoded; on rank 0.
        rows: the rows that this rank writes.
        layout: where they lie in the stream, from the start of the save on.
    """

    planned: PlannedSave
    parts: StateRowParts
    strategy: bytes
    common: CommonFiles | None
    rows: Sequence[int]
    layout: RowLayout

    @classmethod
    def of(cls, planned: PlannedSave, *, rank: int) -> PreparedSave:
        """Encode objects and common state, and lay out the rows. Local."""
        strategy, parts = planned.strategy, planned.parts
        assert isinstance(parts, StateRowParts)  # only in the writer process they are those of a stream
        common = None
        if rank == 0:  # here, where the user's types are known, and now, before their values change
            common = CommonFiles.of(planned.common, strategy, attempt=planned.attempt)
        plan = planned.sized_plan(rank)
        rows = plan.rows_of(rank)
        layout = lay_out_rows(plan.table.nbytes[rows])
        pickled = bytes(ForkingPickler.dumps(strategy))
        return cls(planned, parts, pickled, common, rows.tolist(), layout)


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job that was submitted to the writer process, and its state.

    Attributes:
        job: the job that is sent to the process.
        stop: one past the last position of the stream that belongs to it.
        on_commit: called here when the job is committed.
        on_failure: called here when the job has failed.
        is_sent: whether the job was sent to the process.
        is_staged: whether all that it writes was staged, or never will be.
        is_followed_up: whether `on_commit` is running.
        is_over: whether the job has ended.
        error: why it failed; None if it has not, or `on_failure` has handled the error.
    """

    job: Job
    stop: int
    on_commit: CommitHandler
    on_failure: FailureHandler
    is_sent: bool = False
    is_staged: bool = False
    is_followed_up: bool = False
    is_over: bool = False
    error: CheckpointError | None = None


def shares_bytes(first: PreparedSave, second: PreparedSave) -> bool:
    """Return whether two saves of one state write the same rows of this rank with equal bytes. Pure."""
    has_same_plan = first.planned.plan is second.planned.plan and first.strategy == second.strategy
    # The rows are the same then, but not where they lie: that depends on the sizes of the objects.
    return has_same_plan and np.array_equal(first.layout.nbytes, second.layout.nbytes)


def sendable(strategy: SaveStrategy) -> SaveStrategy:
    """Return the strategy, if it can be sent to another process.

    Raises:
        DeclarationError: it cannot.
    """
    pickled_for_a_writer(strategy)
    return strategy


def pickled_for_a_writer(sent: object) -> bytes:
    """Return a user's strategy or store, pickled for the process that writes asynchronous saves.

    Raises:
        DeclarationError: it cannot be sent to that process.
    """
    kind = type(sent)
    # A class of the script can be pickled here, by name. The writer process has another `__main__`, so only
    # there it would be an error, in the middle of the save.
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise DeclarationError(
            f"{kind.__qualname__} is defined in the script itself, or in a function, where the process that "
            f"writes asynchronous saves cannot import it. Define it in a module."
        )
    try:
        return bytes(ForkingPickler.dumps(sent))
    except Exception as error:
        raise DeclarationError(
            f"{kind.__qualname__} cannot be sent to the process that writes asynchronous saves: {error}. "
            f"Give it attributes that can be pickled, or save synchronously."
        ) from error
