"""Strategies as a user of Megatron-Core writes them: whole, small, and knowing nothing of megackpt."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt.compat.megatron.dist_checkpointing import mapping
from megackpt.compat.megatron.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.compat.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)

MAY_WRITE = threading.Event()
"""For tests that change tensors before an asynchronous save has read them."""
MAY_WRITE.set()


def write_shards(shards: list[Any], path: Path) -> None:
    """Write one rank's shards; also the function of an asynchronous request."""
    assert MAY_WRITE.wait(60)
    torch.save(shards, path)


def own_shards(sharded_state_dict: Any) -> list[Any]:
    """Return what this rank writes of its tensors."""
    tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, mapping.ShardedTensor)]
    mains = [t for t in tensors if mapping.is_main_replica(t.replica_id)]
    return [(t.key, t.global_shape, t.global_offset, t.data) for t in mains]


class FilePerRank(SaveShardedStrategy):
    """Writes the tensors of each rank to a file of its own."""

    def __init__(self, backend: str = "file_per_rank", version: int = 1) -> None:
        super().__init__(backend, version)
        self.handed: Any = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        self.handed = sharded_state_dict
        for tensor in nested_values(sharded_state_dict):
            assert isinstance(tensor, mapping.ShardedTensor), tensor
        write_shards(own_shards(sharded_state_dict), checkpoint_dir / f"rank_{dist.get_rank()}.pt")
        dist.barrier()


class AsyncFilePerRank(AsyncSaveShardedStrategy):
    """The same, later."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> AsyncRequest:
        path = checkpoint_dir / f"rank_{dist.get_rank()}.pt"
        return AsyncRequest(write_shards, (own_shards(sharded_state_dict), path), [])


class LoadFilePerRank(LoadShardedStrategy):
    """Fills tensors from all files that hold something of them."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        def loaded(tensor: Any) -> Any:
            into = torch.full(tensor.local_shape, -1.0, dtype=tensor.dtype)
            for key, _, offset, data in self._stored(checkpoint_dir):
                if key == tensor.key:
                    self._copy(data, offset, into, tensor.global_offset)
            assert (into != -1).all(), tensor.key
            return into

        return dict_list_map_outplace(loaded, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> Any:
        return {
            key: mapping.ShardedTensor.from_rank_offsets(
                key, torch.empty(shape, device="meta")
            ).without_data()
            for key, shape, _, _ in self._stored(checkpoint_dir)
        }

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "file_per_rank":
            raise NotImplementedError

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise NotImplementedError

    @staticmethod
    def _stored(checkpoint_dir: Path) -> Iterator[Any]:
        for name in sorted(os.listdir(checkpoint_dir)):
            if name.startswith("rank_"):
                yield from torch.load(os.path.join(checkpoint_dir, name))

    @staticmethod
    def _copy(data: Any, offset: Any, into: Any, start: Any) -> None:
        low = [max(*pair) for pair in zip(offset, start, strict=True)]
        ends = [(o + d, s + i) for o, d, s, i in zip(offset, data.shape, start, into.shape, strict=True)]
        high = [min(*pair) for pair in ends]
        if all(a < b for a, b in zip(low, high, strict=True)):
            source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            into[target] = data[source]


class OneFileCommon(SaveCommonStrategy):
    """Writes common state, and objects, under names of its own."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        if dist.get_rank() == 0:
            torch.save(common_state_dict, os.path.join(checkpoint_dir, "mine.common"))

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> None:
        for entity in nested_values(sharded_objects_state_dict):
            if mapping.is_main_replica(entity.replica_id):
                name = entity.unique_key.replace("/", "__") + ".object"
                torch.save(entity.data, os.path.join(checkpoint_dir, name))


class LoadOneFileCommon(LoadCommonStrategy):
    """Reads them."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_common(self, checkpoint_dir: Any) -> Any:
        return torch.load(os.path.join(checkpoint_dir, "mine.common"), weights_only=False)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        def loaded(entity: Any) -> Any:
            name = entity.unique_key.replace("/", "__") + ".object"
            return torch.load(os.path.join(checkpoint_dir, name))

        return dict_list_map_outplace(loaded, sharded_objects_state_dict)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Take any."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Take any."""
