"""A stand-in for the ShardedTensors in a pickle, such as those of the sharded state dicts of FSDP version 1.

A pickle makes such a tensor in two steps. torch's own function makes a tensor of the class, without storage,
and gives it its state: the local shards, metadata, and the numbers of the ranks. Only a subclass of Tensor
can be made in this way.

Source: torch 2.13 `torch._tensor._rebuild_from_type_v2` and `ShardedTensor.__getstate__`.
"""

from __future__ import annotations

from typing import Any

import torch

SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
"""Module and name of the class."""
PROCESS_GROUP_STATE = (SHARDED_TENSOR[0], "ShardedTensor.ProcessGroupState")
"""Module and name of a class in it, which its state has an instance of."""


class PickledShardedTensor(torch.Tensor):
    """A ShardedTensor while a pickle is read: it has the state, and every operation on it is an error.

    `plain_values` replaces it by a `ForeignShardedTensor`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *_: Any) -> PickledShardedTensor:
        """Reject other ways of making one: torch.Tensor would allocate as much memory as a pickle says."""
        raise TypeError("a ShardedTensor that torch did not pickle")

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Reject every operation, as there is no storage."""
        raise TypeError(f"the operation {func} on a ShardedTensor")

    def __setstate__(self, state: Any) -> None:
        vars(self)["pickled_state"] = state
