"""DTensors and ShardedTensors of torch as sharded entities: each is a global array named by its path.

The placements of a DTensor are boxes of the global array, which `geometry.mesh_boxes` computes.
ShardedTensors are those of the sharded state dicts of FSDP version 1. Neither torch.distributed nor its
module _shard is imported: if there is such a tensor, its modules are loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from megackpt.entities.base import declaration_error
from megackpt.entities.recognition import is_dtensor
from megackpt.entities.sharded_tensor import ShardedTensor, TorchShardedTensor
from megackpt.entities.tree import PathKeys, Steps
from megackpt.errors import DeclarationError
from megackpt.plans.geometry.box import MeshCut, mesh_boxes


def adopt_torch_sharded_tensor(steps: Steps, leaf: Any, names: PathKeys) -> TorchShardedTensor:
    """Declare a DTensor or a ShardedTensor of torch; its key is its path.

    Raises:
        DeclarationError: two leaves have one key, or the tensor cannot be saved: see `declare_dtensor` and
            `declare_torch_sharded`.
    """
    return (declare_dtensor if is_dtensor(leaf) else declare_torch_sharded)(names.key_of(steps), leaf)


def declare_torch_sharded(key: str, sharded: Any) -> TorchShardedTensor:
    """Declare the local shards of a ShardedTensor of torch under a key. Local.

    Only methods and private fields are read: the class is deprecated, and torch warns at all other
    attributes.

    Raises:
        DeclarationError: local shards are missing, or one is not strided or contradicts its metadata.

    Source: torch.distributed._shard.sharded_tensor.ShardedTensor.
    """
    group = getattr(sharded, "_process_group", None)
    metadata, shards = sharded.metadata(), sharded.local_shards()
    missing = [] if shards else _local_shards(metadata)
    if group is None or missing:
        what = f"places {missing[0]} on this rank" if missing else "has no process group"
        raise declaration_error(
            key,
            f"the ShardedTensor of shape {tuple(metadata.size)} {what}, but it has no local shards: it was "
            f"never initialised. Make it by init_from_local_shards(...) or FSDP's state_dict().",
        )
    chunks = tuple(_chunk_of(key, metadata, shard) for shard in shards)
    # On a rank outside of the group a placeholder may stand for the group. It has no shards.
    ranks = group.size() if isinstance(group, torch.distributed.ProcessGroup) else 0
    return TorchShardedTensor(key, sharded, chunks, ranks)


def _chunk_of(key: str, metadata: Any, shard: Any) -> ShardedTensor:
    if shard.tensor.layout != torch.strided:
        raise declaration_error(
            key,
            f"a local shard of the ShardedTensor has layout {shard.tensor.layout}; only strided tensors "
            f"can be saved and loaded. Call to_dense() on what it is made from.",
        )
    return ShardedTensor(
        key=key,
        data=shard.tensor.detach(),
        dtype=shard.tensor.dtype,
        local_shape=tuple(shard.metadata.shard_sizes),
        global_shape=tuple(metadata.size),
        global_offset=tuple(shard.metadata.shard_offsets),
    )


def _local_shards(metadata: Any) -> list[str]:
    """Return as text the shards, without empty ones, that the metadata assign to this rank."""
    if not torch.distributed.is_initialized():
        return []
    rank = torch.distributed.get_rank()
    return [
        f"a shard of shape {tuple(shard.shard_sizes)} at {tuple(shard.shard_offsets)}"
        for shard in metadata.shards_metadata
        if shard.placement is not None and shard.placement.rank() == rank and 0 not in shard.shard_sizes
    ]


_PLACEMENTS = "torch.distributed.tensor.placement_types"


def declare_dtensor(key: str, dtensor: Any) -> TorchShardedTensor:
    """Declare the local tensor of a DTensor under a key. Local.

    Raises:
        DeclarationError: a placement is neither Shard nor Replicate, or the local tensor does not have the
            shape that the placements give it.

    Source: torch.distributed.tensor.DTensor.
    """
    mesh = dtensor.device_mesh
    cuts = [_cut_of(key, placement, dtensor.placements) for placement in dtensor.placements]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return TorchShardedTensor(key, dtensor, (), mesh.size())
    local = _local_tensor(dtensor)
    shape = tuple(dtensor.shape)
    boxes = mesh_boxes(shape, tuple(mesh.shape), coordinate, cuts, order=_order_of(dtensor, cuts))
    extents = [max(b.local_start[dim] + b.box.shape[dim] for b in boxes) for dim in range(len(shape))]
    if tuple(local.shape) != tuple(extents):
        raise declaration_error(
            key,
            f"the DTensor of shape {shape} is placed as {tuple(dtensor.placements)} on a mesh "
            f"{tuple(mesh.shape)}, which means a local tensor of shape {tuple(extents)} here, but it has "
            f"{tuple(local.shape)}. Shard it as torch.chunk does (distribute_tensor), or declare what each "
            f"rank holds as a ShardedTensor.",
        )
    # Ranks that differ only along mesh dims that do not cut have replicas of the same boxes.
    replica = tuple(i for i, cut in zip(coordinate, cuts, strict=True) if cut is None)
    chunks = tuple(
        ShardedTensor(
            key=key,
            data=_narrowed(local, b.local_start, b.box.shape),
            dtype=local.dtype,
            local_shape=b.box.shape,
            global_shape=shape,
            global_offset=b.box.start,
            replica_id=replica or 0,
        )
        for b in boxes
    )
    return TorchShardedTensor(key, dtensor, chunks, mesh.size())


def _cut_of(key: str, placement: Any, placements: Sequence[Any]) -> MeshCut | None:
    """Return how one mesh dim cuts the array; None if it replicates."""
    types = sys.modules[_PLACEMENTS]
    strided = getattr(types, "_StridedShard", ())
    if isinstance(placement, strided):  # first, because up to torch 2.9 it is a Shard as well
        return MeshCut(int(placement.dim), int(placement.split_factor))
    if isinstance(placement, types.Shard):
        return MeshCut(int(placement.dim))
    if isinstance(placement, types.Replicate):
        return None
    if isinstance(placement, types.Partial):
        raise declaration_error(
            key,
            f"the DTensor is placed as {tuple(placements)}: a Partial is a sum that is not computed, so "
            f"no rank has its values. Call redistribute(placements=...) with Replicate() or Shard(dim) "
            f"instead of it before saving or loading.",
        )
    raise DeclarationError(
        f"{key!r}: the DTensor is placed as {tuple(placements)}; {type(placement).__name__} is not "
        f"supported. Redistribute it to Shard and Replicate placements.",
        key=key,
    )


def _order_of(dtensor: Any, cuts: Sequence[MeshCut | None]) -> list[int] | None:
    """Return the order of cuts by mesh dims; None for left to right.

    Source: `DTensorSpec.shard_order`, from torch 2.10. Strided cuts contain the order themselves.
    """
    entries = getattr(getattr(dtensor, "_spec", None), "shard_order", None)
    if not entries or any(cut is not None and cut.split_factor > 1 for cut in cuts):
        return None
    return [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims]


def _local_tensor(dtensor: Any) -> torch.Tensor:
    """Return the local tensor itself, without autograd."""
    with torch.no_grad():
        local = dtensor.to_local()
    wait = getattr(local, "wait", None)  # of an AsyncCollectiveTensor: a collective may be under way
    result: torch.Tensor = local if wait is None else wait()
    return result.detach()


def _narrowed(local: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (first, extent) in enumerate(zip(start, shape, strict=True)):
        local = local.narrow(dim, first, extent)
    return local
