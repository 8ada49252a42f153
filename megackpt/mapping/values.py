"""Values that are not tensors of a global array: one per rank, replicated on some ranks, or never stored.

Any other plain leaf is common state, which must be equal on all ranks: only rank 0's is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megackpt.mapping.sharded_object import ShardedObject


@dataclass(eq=False)
class PerRankValue:
    """A value that each rank has of its own: all values are stored, and they may differ.

    Every rank of the job must declare the key. A load on as many ranks gives each rank its own value back. On
    another number of ranks no stored value belongs to a rank: that is an error, or, with `elsewhere="keep"`,
    each rank keeps the value that it declares and a warning is logged.

    Attributes:
        key: name in the checkpoint; the same on all ranks.
        data: this rank's value, of any type that the codec supports.
        elsewhere: what a load on another number of ranks does: raise an error, or keep `data`.
    """

    key: str
    data: Any  # the user's own value
    elsewhere: Literal["error", "keep"] = "error"

    def on(self, rank: int, ranks: int) -> ShardedObject:
        """Return the object that stands for this value on one rank of a job."""
        return ShardedObject(self.key, self.data, (ranks,), (rank,))


@dataclass(eq=False)
class ReplicatedValue:
    """A value that is equal on all ranks that declare it: stored once, and compared at save.

    Unlike common state it need not be on all ranks, and it is loaded by key, on the ranks that request it.
    For large tensors declare a ShardedTensor with a replica_id instead.

    Attributes:
        key: name in the checkpoint.
        data: the value, of any type that the codec supports.
    """

    key: str
    data: Any  # the user's own value

    def on(self, rank: int) -> ShardedObject:
        """Return the object that stands for this value on a rank; the save chooses the main replica."""
        return ShardedObject(self.key, self.data, (1,), (0,), replica_id=rank + 1)


class LocalNonpersistentObject:
    """A leaf that `save` drops. `load` puts its local value into the loaded state dict.

    Source: Megatron-Core `dist_checkpointing.mapping.LocalNonpersistentObject`.
    """

    def __init__(self, obj: Any) -> None:  # the user's own object
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped object."""
        return self.obj
