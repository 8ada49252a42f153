"""DataPosition: how far a run has come in an order of samples that all data-parallel ranks share.

Owns one integer, which is exact at any number of ranks and any batch size. What is at an index is the order's
affair (`sample_order`), or the program's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.geometry import split_range
from megackpt.mapping import ShardedStateDict


class DataPosition:
    """A position in one global order: everything before it was consumed, by whichever rank.

    Args:
        order: what tells this order of samples from others, such as `SampleOrder.to_json()` or a fingerprint
            of the data: plain values. A checkpoint of another order is refused.

    Attributes:
        consumed: how many samples were consumed by all ranks, in all epochs.

    >>> data = DataPosition({"files": "v1"})
    >>> data.take(6, dp_rank=1, dp_size=2), data.take(6, dp_rank=0, dp_size=3), data.consumed
    (range(3, 6), range(6, 8), 12)
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.order = dict(order)
        self.consumed = 0

    def take(self, batch: int, *, dp_rank: int = 0, dp_size: int = 1) -> range:
        """Return this rank's share of the indices of the next global batch, and move on by the whole batch.

        Local; every rank calls it, also those that read no data. Where dp_size does not divide the batch, the
        first ranks have one more.

        Raises:
            DeclarationError: an empty batch.
        """
        if batch < 1:
            raise DeclarationError(f"A batch of {batch} samples has no indices. Give at least 1.")
        start, stop = split_range(batch, parts=dp_size, index=dp_rank)
        first = self.consumed
        self.consumed += batch
        return range(first + start, first + stop)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return order and position, which are common state. Local."""
        return {"order": dict(self.order), "consumed": self.consumed}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Go on behind what was consumed. Local.

        Raises:
            MismatchError: the checkpoint's order of samples is another one; names what differs.
        """
        stored = loaded["order"]
        fields = sorted(stored.keys() | self.order.keys())
        differing = [
            f"{name}: {stored.get(name)!r} stored, {self.order.get(name)!r} here"
            for name in fields
            if stored.get(name) != self.order.get(name)
        ]
        if differing:
            raise MismatchError(
                f"The data position counts samples in another order:\n{truncated_list(differing)}\n"
                f"Give the data, seed and sample length it was trained with; or begin at 0, without resuming "
                f"the position."
            )
        self.consumed = int(loaded["consumed"])
        return ""
