"""A save as a process of its own can be given it: strategy pickled, common state encoded, rows laid out.

Owns what of a planned save leaves the training process besides the bytes of rows, which strategies can, and
when two saves may read the same staged bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler

import numpy as np

from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.staging_memory import RowLayout, lay_out_rows
from megackpt.engine.background.submitted_job import CommitHandler, FailureHandler
from megackpt.engine.saving.save import SaveRequest
from megackpt.engine.saving.write import CommonFiles, PlannedSave
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import DeclarationError
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import VerifyOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """Where a state is to be saved, and what becomes of that.

    Attributes:
        request: the state, in the format for this place.
        place: where to; below a root it is equal on all ranks.
        label: what to call it in messages; equal on all ranks.
        planned: called on every rank when all have agreed how to save it, and nothing is staged. Collective.
        follow: called on rank 0 after the commit, in a thread of its own, with what was found damaged.
        failed: called on every rank when the save has failed, be it in planning; or `planned` has.
        verify: how what is committed is read again, by each rank its share; None if it is not. Not on nodes.
    """

    request: SaveRequest
    place: CheckpointLocation | NodeLocation
    label: str
    follow: CommitHandler
    failed: FailureHandler
    planned: Callable[[], None] = lambda: None
    verify: VerifyOptions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSave:
    """A save of which this rank knows everything, before it is staged.

    Attributes:
        planned: what all ranks have agreed on.
        strategy: the format's strategy, pickled.
        common: common state, encoded; on rank 0.
        rows: this rank's.
        layout: where they will lie, from the start of the save on.
        in_order: whether the strategy takes them in order.
    """

    planned: PlannedSave
    strategy: bytes
    common: CommonFiles | None
    rows: Sequence[int]
    layout: RowLayout
    in_order: bool

    @classmethod
    def of(cls, planned: PlannedSave, strategy: SaveStrategy, *, rank: int) -> PreparedSave:
        """Encode what is not tensors, and lay out what is. Local."""
        common = None
        if rank == 0:  # here, where the user's types are known, and now, before they change
            common = CommonFiles.of(planned.common, strategy, attempt=planned.attempt)
        rows = planned.plan.rows_of(rank)
        layout = lay_out_rows(planned.plan.table.nbytes[rows])
        pickled = bytes(ForkingPickler.dumps(strategy))
        return cls(planned, pickled, common, rows.tolist(), layout, strategy.capabilities.writes_in_order)


def shares_bytes(one: PreparedSave, other: PreparedSave) -> bool:
    """Say whether two saves of one state write the same rows of this rank, encoded alike. Local, pure."""
    alike = one.planned.kept is other.planned.kept and one.strategy == other.strategy
    return alike and np.array_equal(one.planned.sizes, other.planned.sizes)


def for_a_writer(request: SaveRequest) -> SaveRequest:
    """Return the request, refused if a process of its own cannot be given its strategy."""
    return replace(request, choose=lambda: sendable(request.choose()))


def sendable(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that another process can be given.

    Raises:
        DeclarationError: it cannot.
    """
    pickled_for_a_writer(strategy)
    return strategy


def pickled_for_a_writer(given: object) -> bytes:
    """Return a strategy or a store of a user as the process that writes asynchronous saves is sent it.

    Raises:
        DeclarationError: that process cannot be given it.
    """
    kind = type(given)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise DeclarationError(
            f"{kind.__qualname__} is defined in the script itself, or in a function, where the process that "
            f"writes asynchronous saves cannot import it. Define it in a module."
        )
    try:
        return bytes(ForkingPickler.dumps(given))
    except Exception as error:
        raise DeclarationError(
            f"{kind.__qualname__} cannot be sent to the process that writes asynchronous saves: {error}. "
            f"Give it attributes that can be pickled, or save synchronously."
        ) from error
