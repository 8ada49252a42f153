"""XLA SPMD: tensors of torch_xla in state dicts of ours and in `torch.distributed.checkpoint`.

`megackpt.save` and `megackpt.load` take sharded tensors of torch_xla as they are; `declare_xla` gives one a
key of its own. The planners here do the same for `torch.distributed.checkpoint`: each box on the devices of
this host is one write item, a box on several devices is written once in the world, and a load moves a
tensor to the devices when all of its boxes have arrived. Nothing of torch_xla is imported.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megackpt.entities.recognition import xla_tensor_of
from megackpt.entities.xla import HostShards, XlaTensor, declare_xla
from megackpt.errors import CoverageError

__all__ = ["SPMDLoadPlanner", "SPMDSavePlanner", "XlaLoadPlanner", "XlaSavePlanner", "declare_xla"]


class XlaSavePlanner(DefaultSavePlanner):
    """Saves state dicts that hold tensors sharded by XLA; anything else is left to torch's planner.

    Replicated tensors are among what is left: torch's planner keeps one copy of them. The methods are local:
    torch's functions do the communication.

    Raises:
        DeclarationError: when planning, if a sharding is still pending.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take a state dict; its sharded tensors are looked at when the plan is made."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {key: _unwrapped(key, leaf) for key, leaf in self.state_dict.items()}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the elements of a box, or what torch's planner finds."""
        tensor = self.state_dict.get(index.fqn)
        return (
            tensor.taken(index)
            if isinstance(tensor, _ShardedTensorInterface)
            else super().lookup_object(index)
        )


class XlaLoadPlanner(DefaultLoadPlanner):
    """Loads into state dicts that hold tensors sharded by XLA; anything else is left to torch's planner.

    Its methods are local: torch's functions do the communication.

    Raises:
        CoverageError: when planning, if the checkpoint lacks elements of a tensor.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take a state dict to fill, and the metadata of the checkpoint."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._user_state_dict = self.state_dict
        self.state_dict = {key: _unwrapped(key, leaf) for key, leaf in self.state_dict.items()}

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count the parts that each tensor has to wait for.

        Raises:
            CoverageError: the checkpoint lacks elements that this host's devices need.
        """
        plan = super().finish_plan(new_plan)
        reads = [
            item
            for item in plan.items
            if isinstance(self.state_dict.get(item.dest_index.fqn), _ShardedTensorInterface)
        ]
        for key, count in Counter(item.dest_index.fqn for item in reads).items():
            self.state_dict[key].awaited = count
        elements = Counter[str]()
        for item in reads:
            elements[item.dest_index.fqn] += math.prod(item.lengths)
        stored = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for key, leaf in self.state_dict.items():
            if isinstance(leaf, _ShardedTensorInterface) and key in stored and elements[key] < leaf.numel:
                raise CoverageError(
                    f"{key!r}: the checkpoint has {elements[key]} of the {leaf.numel} elements that this "
                    f"host's devices need. The save lost the others; load another checkpoint.",
                    key=key,
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the host's buffer of a box, or what torch's planner finds."""
        tensor = self.state_dict.get(index.fqn)
        return (
            tensor.buffer(index)
            if isinstance(tensor, _ShardedTensorInterface)
            else super().lookup_tensor(index)
        )

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Put a tensor onto the devices once all of its boxes have arrived."""
        target = self.state_dict.get(read_item.dest_index.fqn)
        if isinstance(target, _ShardedTensorInterface):
            target.arrived()
        else:
            super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Put an object into the state dict."""
        super().load_bytes(read_item, value)
        if not self.flatten_state_dict:  # torch's planner then writes into what it takes for the user's dict
            self._user_state_dict[read_item.dest_index.fqn] = self.state_dict[read_item.dest_index.fqn]


def _unwrapped(key: str, leaf: Any) -> Any:
    """Return what stands for a leaf while a plan is carried out."""
    tensor = xla_tensor_of(leaf)
    if tensor is None:
        return leaf
    sharded = _ShardedTensorInterface(key, tensor)
    return tensor.global_tensor if sharded.is_replicated else sharded


# The names that programs written for `torch_xla.experimental.distributed_checkpoint` use.
SPMDSavePlanner = XlaSavePlanner
SPMDLoadPlanner = XlaLoadPlanner


class _ShardedTensorInterface:
    """A sharded tensor in the interface by which torch's planners ask a tensor for its items.

    It holds the host's copy of a tensor from the plan to the last use. Storage may ask from several threads.

    Attributes:
        is_replicated: every device has the whole tensor.
        awaited: how many reads have not arrived yet.
    """

    def __init__(self, key: str, tensor: XlaTensor) -> None:
        self.awaited = 0
        self._lock = threading.Lock()
        self._size, self._properties = tensor.shape, TensorProperties(dtype=tensor.dtype)
        shards = HostShards.of(key, tensor)
        self.is_replicated = shards.is_replicated
        # Of an array with elements the boxes that have none are left out: they would share their start with
        # others.
        kept = [s for s in shards.shards if s.data.numel() or 0 in tensor.shape]
        self._boxes = [(s.start, tuple(s.data.shape), s.replica_id) for s in kept]
        self._data = {s.start: s.data for s in kept}
        self._shards: HostShards | None = shards

    @property
    def numel(self) -> int:
        """Elements on this host, copies counted once."""
        return sum(math.prod(shape) for _, shape, _ in self._boxes)

    def size(self) -> torch.Size:
        """Return the global shape."""
        return self._size

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        main_boxes = [(start, shape) for start, shape, replica in self._boxes if replica == 0]
        self._shards = None  # nothing goes back to the devices; what is not written here is not needed either
        self._data = {start: self._data[start] for start, _ in main_boxes}
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(start), i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(start, shape), self._properties, self._size),
            )
            for i, (start, shape) in enumerate(main_boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(start, shape) for start, shape, _ in self._boxes]

    def buffer(self, index: MetadataIndex) -> torch.Tensor:
        """Return the host's copy of the box that an item is about."""
        return self._data[tuple(index.offset or ())]

    def taken(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of the box that an item is about, for the last time."""
        return self._data.pop(tuple(index.offset or ()))

    def arrived(self) -> None:
        """Note that one read has been done; the last one puts the tensor onto the devices."""
        with self._lock:
            self.awaited -= 1
            if self.awaited == 0 and self._shards is not None:
                self._shards.commit()
                self._shards, self._data = None, {}


def _chunk(start: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
