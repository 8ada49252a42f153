"""Plain values by who has them: per rank, or replicated. Any other plain leaf is common state.

Owns the two declarations. A value that differs from rank to rank and is declared as common would be lost on
all ranks but one, so the three are kept apart. Owns also what a load makes of plain tensors that the
checkpoint holds as global arrays.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megackpt.mapping.sharded_object import ShardedObject
from megackpt.mapping.sharded_tensor import ShardedTensor
from megackpt.mapping.tree import join_dotted, map_leaves


@dataclass(eq=False)
class PerRank:
    """A value that each rank has of its own: all are stored, none is compared with another.

    Every rank of the job declares the key. A load on as many ranks gives each rank its own value back. On
    another number of ranks there is no such thing: that is an error, or, with `elsewhere="keep"`, each rank
    keeps the value that it declares and a warning says so.

    Attributes:
        key: name in the checkpoint; one for all ranks.
        data: this rank's value; anything the codec knows.
        elsewhere: what a load on another number of ranks does.
    """

    key: str
    data: Any  # the user's own value
    elsewhere: Literal["error", "keep"] = "error"

    def on(self, rank: int, ranks: int) -> ShardedObject:
        """Return the object that this is on a rank of a job."""
        return ShardedObject(self.key, self.data, (ranks,), (rank,))


@dataclass(eq=False)
class Replicated:
    """A value that some ranks hold, the same on all of them: stored once, equality is proved at save.

    Unlike common state it need not be on all ranks, and it is loaded by key, where it is asked for. For
    large tensors declare a ShardedTensor with a replica_id instead.

    Attributes:
        key: name in the checkpoint.
        data: the value; anything the codec knows.
    """

    key: str
    data: Any  # the user's own value

    def on(self, rank: int) -> ShardedObject:
        """Return the object that this is on a rank; which rank's is the main replica is decided at save."""
        return ShardedObject(self.key, self.data, (1,), (0,), replica_id=rank + 1)


def whole_tensors(state: Any, keys: Container[str]) -> Any:
    """Return the tree with every plain tensor whose path, joined with dots, is one of keys as a whole array.

    What was saved from DTensors under these paths is thereby loaded into a model without any. The given tree
    is not changed.
    """

    def declared(key: str, leaf: Any) -> Any:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or key not in keys:
            return leaf
        shape = tuple(leaf.shape)
        return ShardedTensor(key, leaf, leaf.dtype, shape, shape, (0,) * len(shape))

    return map_leaves(declared, state, step=join_dotted) if keys else state
