"""DTensors and ShardedTensors of torch as sharded entities: each is a global array named by its path.

`dtensor` declares DTensors. ShardedTensors of torch, as in the sharded state dicts of FSDP version 1, are
declared here. torch.distributed._shard is not imported: if there is a ShardedTensor, its module is loaded
already.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from megackpt.mapping.checks import declaration_error
from megackpt.mapping.dtensor import declare_dtensor
from megackpt.mapping.recognition import is_dtensor, is_torch_sharded, is_torch_sharded_class
from megackpt.mapping.sharded_tensor import ShardedTensor, TorchShardedTensor
from megackpt.mapping.tree import PathKeys, Steps, add_step, map_leaves


def adopt_torch_sharded_tensors(state: Any, kinds: Set[type], names: PathKeys) -> Any:
    """Return the tree with every DTensor and ShardedTensor of torch as a TorchSharded.

    The given tree is not changed.

    Args:
        state: nested dicts and lists.
        kinds: the classes of its leaves; see `leaf_types`.
        names: gives each leaf its key.

    Raises:
        DeclarationError: two of them have one key, or one cannot be saved: see `declare_dtensor` and
            `declare_torch_sharded`.
    """
    if not any(map(is_torch_sharded_class, kinds)):
        return state

    def adopt_leaf(steps: Steps, leaf: Any) -> Any:
        if not is_torch_sharded(leaf):
            return leaf
        return (declare_dtensor if is_dtensor(leaf) else declare_torch_sharded)(names.key_of(steps), leaf)

    return map_leaves(adopt_leaf, state, (), step=add_step)


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
