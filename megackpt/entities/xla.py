"""Tensors that XLA has sharded over devices (SPMD), as the chunks that the devices of one host have.

One process drives several devices, so one leaf is several chunks, and with partial replication several
devices of one host may have the same chunk. torch_xla is not imported here, and need not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megackpt.entities.base import ReplicaId
from megackpt.entities.factory import ShardedTensorFactory
from megackpt.entities.recognition import XLA_PACKAGE, is_torch_sharded, xla_tensor_of
from megackpt.entities.sharded_object import LocalNonpersistentObject
from megackpt.entities.sharded_tensor import ShardedTensor
from megackpt.entities.torch_sharded import adopt_torch_sharded_tensor
from megackpt.entities.tree import PathKeys, Steps
from megackpt.errors import DeclarationError


class XlaShard(Protocol):
    """What one device holds of a tensor. Source: torch_xla 2.9, `distributed.spmd.XLAShard`.

    Attributes:
        data: a copy in host memory, padded at the ends of the array to the shape that all shards have.
        indices: the box without padding, one slice per dim; Ellipsis where every device has it all.
        shard_device: name of the device.
        replica_id: which copy of the box this is, counted over the devices of all hosts.
    """

    data: torch.Tensor
    indices: Any  # Ellipsis, whose type has no name before Python 3.10's types.EllipsisType, or slices
    shard_device: str
    replica_id: int


class XlaTensor(Protocol):
    """The part of `XLAShardedTensor` that is used here. Source: torch_xla 2.9.

    Attributes:
        shape: of the global array.
        dtype: of the global array.
        global_tensor: the tensor that the user sees; of a replicated one only it can be filled.
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of the global array."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    @property
    def global_tensor(self) -> torch.Tensor:
        """The tensor without its wrapper."""

    @property
    def local_shards(self) -> Sequence[XlaShard]:
        """What the devices of this host hold, copied to host memory."""

    def load_local_shards_(self, shards: Sequence[XlaShard]) -> None:
        """Put the data of shards, one of every device of this host, onto the devices."""


def adopt_xla_tensor(steps: Steps, leaf: Any, names: PathKeys) -> Any:
    """Declare a tensor that XLA has sharded; its key is its path. Another tensor stays, or is a DTensor.

    Raises:
        DeclarationError: two leaves get one key.
    """
    if xla_tensor_of(leaf) is not None:
        return declare_xla(names.key_of(steps), leaf)
    return adopt_torch_sharded_tensor(steps, leaf, names) if is_torch_sharded(leaf) else leaf


@dataclass(frozen=True, slots=True)
class HostShard:
    """One box of a tensor that devices of this host have.

    Attributes:
        start: first element of the box in the global array.
        data: its elements in host memory, without padding: a view of what is copied back to the devices.
        replica_id: the lowest of the replicas on this host; 0 on exactly one host.
    """

    start: tuple[int, ...]
    data: torch.Tensor
    replica_id: int


@dataclass(frozen=True, slots=True)
class HostShards:
    """The different boxes of one tensor that the devices of this host have.

    Attributes:
        tensor: the tensor.
        shards: each box once, even if several devices have it.
    """

    tensor: XlaTensor
    shards: tuple[HostShard, ...]
    _on_devices: tuple[XlaShard, ...] = field(repr=False)

    @classmethod
    def of(cls, key: str, tensor: XlaTensor) -> HostShards:
        """Copy the local shards of a tensor to host memory; key is for errors.

        Raises:
            DeclarationError: a shard does not have the elements that its indices describe.
        """
        _wait_for_devices()
        on_devices = tuple(tensor.local_shards)
        positions: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        shards: list[HostShard] = []
        box_of = []
        for shard in on_devices:
            start, shape = _box(shard.indices, tuple(tensor.shape))
            _check_padding(key, tuple(tensor.shape), start, shape, tuple(shard.data.shape))
            at = positions.setdefault((start, shape), len(shards))
            box_of.append(at)
            if at == len(shards):
                data = shard.data[tuple(slice(0, n) for n in shape)]
                shards.append(HostShard(start, data, shard.replica_id))
            elif shard.replica_id < shards[at].replica_id:
                shards[at] = HostShard(start, shards[at].data, shard.replica_id)
            shard.data = on_devices[box_of.index(at)].data  # replicas on this host share one buffer
        return cls(tensor, tuple(shards), on_devices)

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole tensor."""
        return all(shard.indices is Ellipsis for shard in self._on_devices)

    def commit(self) -> None:
        """Copy the elements of all shards, which a load may have changed, to the devices."""
        if self.is_replicated:
            with torch.no_grad():
                self.tensor.global_tensor.copy_(self.shards[0].data)  # torch_xla cannot load shards of it
        else:
            self.tensor.load_local_shards_(list(self._on_devices))


def declare_xla(key: str, tensor: Any, *, replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Declare a tensor that XLA has sharded: one ShardedTensor for each box that this host's devices have.

    `save` and `load` call it for such leaves, with their path in the state dict as the key; call it to choose
    another key. The host that has replica 0 of a box declares the main replica. Shards are copied to host
    memory when `save` or `load` flattens the state dict, and back to the devices, tensor by tensor, when
    everything has been loaded. Local.

    Args:
        key: unique name of the global array.
        tensor: an XLAShardedTensor, or a tensor marked as sharded.
        replica_id: for states that several SPMD worlds have; 0 in the main one.

    Raises:
        DeclarationError: the tensor is not sharded by XLA.
    """
    if xla_tensor_of(tensor) is None:
        raise DeclarationError(
            f"{key!r}: a {type(tensor).__name__} that XLA has not sharded. Mark it with "
            f"torch_xla.distributed.spmd.mark_sharding() first, or declare it as any other tensor.",
            key=key,
        )
    return ShardedTensorFactory(key, tensor, _build, _merge, replica_id)


def _build(key: str, leaf: Any, replica_id: ReplicaId, flattened_range: slice | None) -> dict[str, Any]:
    """Declare the boxes of this host, together with the value that copies them back, which is not saved."""
    tensor = xla_tensor_of(leaf)
    if tensor is None or flattened_range is not None:
        raise DeclarationError(
            f"{key!r}: a {type(leaf).__name__} that XLA has not sharded, or a flat part of one, is declared "
            f"like one that it has. Shard it in the same way first.",
            key=key,
        )
    shards = HostShards.of(key, tensor)
    return {
        "boxes": [_declared(key, tensor, shard, replica_id) for shard in shards.shards],
        "back": LocalNonpersistentObject((leaf, shards)),
    }


def _merge(loaded: dict[str, Any]) -> Any:
    """Copy loaded boxes to the devices, and return the user's leaf."""
    leaf, shards = loaded["back"]
    shards.commit()
    return leaf


def _wait_for_devices() -> None:
    """Wait for the devices: torch_xla fails to copy shards that a step is still computing."""
    model = sys.modules.get(f"{XLA_PACKAGE}.core.xla_model")
    if model is not None:
        model.wait_device_ops()


def _declared(key: str, tensor: XlaTensor, shard: HostShard, replica_id: ReplicaId) -> ShardedTensor:
    outer = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    return ShardedTensor(
        key=key,
        data=shard.data,
        dtype=tensor.dtype,
        local_shape=tuple(shard.data.shape),
        global_shape=tuple(tensor.shape),
        global_offset=shard.start,
        replica_id=(*outer, shard.replica_id),
    )


def _box(indices: Any, whole: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if indices is Ellipsis:
        return (0,) * len(whole), whole
    return tuple(s.start for s in indices), tuple(s.stop - s.start for s in indices)


def _check_padding(
    key: str,
    whole: tuple[int, ...],
    start: tuple[int, ...],
    shape: tuple[int, ...],
    padded: tuple[int, ...],
) -> None:
    """Check that a padded shard and its box belong to an even split of the array.

    torch_xla does not check what it loads: it reads beyond the end of a buffer that is too small.
    """
    fit = len(padded) == len(whole) == len(start)
    for extent, first, length, room in zip(whole, start, shape, padded, strict=fit):
        at_end = first == extent and length == 0  # padding only
        fit = fit and (at_end or (first % max(room, 1) == 0 and length == min(room, extent - first)))
    if not fit:
        raise DeclarationError(
            f"{key!r}: a shard of shape {padded} at {start} with extents {shape} is no part of an even "
            f"split of {whole}. The sharding may still be pending: call torch_xla.sync() first.",
            key=key,
        )
