"""A save as a process of its own can be given it: strategy pickled, common state encoded, rows laid out.

Owns what of a planned save leaves the training process besides the bytes of rows, and which strategies can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler

from megackpt.engine.arena import Layout, lay_out
from megackpt.engine.save import SaveRequest
from megackpt.engine.write import CommonFiles, Planned
from megackpt.errors import DeclarationError
from megackpt.formats.strategy import SaveStrategy, writes_in_order


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A save of which this rank knows everything, before it is staged.

    Attributes:
        planned: what all ranks have agreed on.
        strategy: the format's strategy, pickled.
        common: common state, encoded; on rank 0.
        rows: this rank's.
        layout: where they will lie, from the start of the save on.
        in_order: whether the strategy takes them in order.
    """

    planned: Planned
    strategy: bytes
    common: CommonFiles | None
    rows: Sequence[int]
    layout: Layout
    in_order: bool

    @classmethod
    def of(cls, planned: Planned, strategy: SaveStrategy, *, rank: int) -> Prepared:
        """Encode what is not tensors, and lay out what is. Local."""
        common = None
        if rank == 0:  # here, where the user's types are known, and now, before they change
            common = CommonFiles.of(planned.common, strategy, attempt=planned.attempt)
        rows = planned.plan.rows_of(rank)
        layout = lay_out(planned.plan.table.nbytes[rows])
        pickled = bytes(ForkingPickler.dumps(strategy))
        return cls(planned, pickled, common, rows.tolist(), layout, writes_in_order(strategy))


def for_a_writer(request: SaveRequest) -> SaveRequest:
    """Return the request, refused if a process of its own cannot be given its strategy."""
    return replace(request, choose=lambda: sendable(request.choose()))


def sendable(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that another process can be given.

    Raises:
        DeclarationError: it cannot.
    """
    kind = type(strategy)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise DeclarationError(
            f"{kind.__qualname__} is defined in the script itself, or in a function, where the process that "
            f"writes asynchronous saves cannot import it. Define it in a module."
        )
    try:
        ForkingPickler.dumps(strategy)
    except Exception as error:
        raise DeclarationError(
            f"{kind.__qualname__} cannot be sent to the process that writes asynchronous saves: {error}. "
            f"Give it attributes that can be pickled, or save synchronously."
        ) from error
    return strategy
