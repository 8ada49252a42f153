"""Entities as tensors that torch.distributed.checkpoint takes, for programs that call it themselves.

`save` and `load` do not need them. Source: Megatron-Core `dist_checkpointing.strategies.checkpointable`, for
the names, and torch's protocol `torch.distributed._checkpointable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megackpt.entities import ShardedTensor
from megackpt.errors import DeclarationError


class _Checkpointable(torch.Tensor):
    """A tensor with the shape of a whole array and without data: only its shards can be read or written."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Raise an error: there is nothing to calculate with.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{func} cannot be called with a {cls.__name__}, which has no data of its own. Use the tensor "
            f"of its ShardedTensor."
        )


class CheckpointableShardedTensor(_Checkpointable):
    """One shard for torch.distributed.checkpoint, which may lie anywhere in its array: grids may be uneven.

    Args:
        data: the local tensor, with the shape that the entity declares; a load fills it.
        sh_ten: the entity. Prepended axes have extent 1 in the stored chunk.

    Raises:
        DeclarationError: the entity is a flat range, or has no data; chunks of that library are boxes.
    """

    _sh_ten: ShardedTensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Return a tensor of the global shape, without data."""
        if sh_ten.flattened_range is not None or sh_ten.data is None:
            what = "has no data" if sh_ten.data is None else "is a flat range, and DCP stores boxes only"
            raise DeclarationError(
                f"{sh_ten.key!r} {what}, so torch.distributed.checkpoint cannot handle it. Use "
                f"megackpt.save() and load().",
                key=sh_ten.key,
            )
        made: CheckpointableShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(sh_ten.global_shape), dtype=data.dtype, device=data.device
        )
        return made

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data
        self._sh_ten = sh_ten

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Return the entity as such a tensor; its data is shared."""
        data: Any = sh_ten.data
        return cls(data, sh_ten)

    @property
    def _shard(self) -> torch.Tensor:
        """The local tensor with an axis of extent 1 for each prepended one."""
        return self._data.view(*self._chunk.sizes)

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        entity = self._sh_ten
        sizes = torch.Size([1] * entity.prepend_axis_num + list(entity.local_shape))
        return ChunkStorageMetadata(offsets=torch.Size(entity.global_offset), sizes=sizes)

    def __create_write_items__(self, fqn: str, _: Any, index: int | None = None) -> list[WriteItem]:
        """Return the one item to write; index is its place in a container."""
        chunk = self._chunk
        properties = TensorProperties.create_from_tensor(self._data)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets, index), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the one chunk that a load fills."""
        return [self._chunk]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        """Return the local tensor, with the shape of the chunk."""
        return self._shard

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(_Checkpointable):
    """Several shards of one array, of one rank: torch.distributed.checkpoint takes one tensor for each key.

    Raises:
        DeclarationError: there are none, or they are of different arrays.
    """

    @staticmethod
    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor]) -> LocalShardsContainer:
        """Return a tensor of the global shape, without data."""
        shapes = {(shard._sh_ten.key, tuple(shard.size())) for shard in local_shards}
        if len(shapes) != 1:
            raise DeclarationError(
                f"The shards of a LocalShardsContainer must belong to one array; these belong to "
                f"{sorted(shapes)}. Make a container for each array."
            )
        first = local_shards[0]
        made: LocalShardsContainer = torch.Tensor._make_wrapper_subclass(
            cls, first.size(), dtype=first.dtype, device=first.device
        )
        return made

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = list(local_shards)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return the items of all shards."""
        return [
            item
            for number, shard in enumerate(self._local_shards)
            for item in shard.__create_write_items__(fqn, shard, number)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks of all shards."""
        return [shard._chunk for shard in self._local_shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the shard that begins at the offset of the index.

        Raises:
            ValueError: there is none.
        """
        for shard in self._local_shards:
            if shard._chunk.offsets == index.offset:
                return shard._shard
        raise ValueError(f"{index.fqn!r}: no shard of this container begins at {index.offset}.")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_shards!r})"
