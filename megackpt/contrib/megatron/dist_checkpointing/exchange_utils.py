"""Who writes or reads a shard that several ranks hold.

Source: Megatron-Core `dist_checkpointing.exchange_utils`, for the names.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import nested_values
from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.entities import ShardedStateDict, ShardedTensor, is_main_replica
from megackpt.errors import DeclarationError

_PLANNED = {
    "because": "tensors are not exchanged by shards. A plan for all ranks, made before anything is read, "
    "says which rank reads which bytes and which ranks need them.",
    "instead": "Load with LoadOptions(exchange=...) or FullyParallelLoadStrategyWrapper(exchange_algo=...).",
}

T = TypeVar("T", bound=Hashable)


class ShardDistribution(NamedTuple):
    """Which rank of a group writes or reads each shard. Plain data; the engine's own plans are finer.

    Attributes:
        main_rank_for_shard: the rank that does it, by shard.
        shards_in_this_group: shards that ranks of this group hold.
        shard_to_metadata: one ShardedTensor for each.
        all_ranks_for_shard: all ranks that hold each.
    """

    main_rank_for_shard: dict[Any, int]
    shards_in_this_group: set[Any]
    shard_to_metadata: dict[Any, ShardedTensor]
    all_ranks_for_shard: dict[Any, list[int]] = {}  # noqa: RUF012 - a default as of old; nothing here fills it


def distribute_shards_to_ranks(
    shard_to_ranks: dict[T, list[int]],
    shard_to_size: dict[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Set[T] = frozenset(),
) -> dict[T, int]:
    """Return a rank for each shard, so that bytes are even.

    Pure. Shards that fewest ranks hold come first, of those the largest. shard_to_ranks says who holds each
    shard, shard_to_size how large it is. Shards that several groups read (cross_parallelization_group_loads)
    are given out after the others.

    Raises:
        DeclarationError: a shard is held by no rank.
    """
    nobody = [shard for shard, ranks in shard_to_ranks.items() if not ranks]
    if nobody:
        raise DeclarationError(
            f"Shard {nobody[0]!r} is held by no rank, so none can be chosen. Give its ranks."
        )

    def turn(shard: T) -> tuple[bool, int, int]:
        crosses = shard in cross_parallelization_group_loads
        return (crosses, len(shard_to_ranks[shard]), -shard_to_size[shard])

    load = [0] * num_ranks
    chosen: dict[T, int] = {}
    for shard in sorted(shard_to_ranks, key=turn):  # stable: equals in the order given
        rank = min(shard_to_ranks[shard], key=lambda owner: (load[owner], owner))
        chosen[shard] = rank
        load[rank] += shard_to_size[shard]
    return chosen


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: dist.ProcessGroup | None = None,
    ignore_groups: bool = False,
    pg_cache_path: str | None = None,
    pg_cache_create: bool = False,
) -> ShardDistribution | None:
    """Choose one rank of a group for each tensor shard, so that bytes are even; None for a group of one.

    Collective over the group, None for all ranks. Shards whose main replica is in another group are left
    out, unless ignore_groups. pg_cache_path and pg_cache_create have no effect: nothing is kept in files.

    Source: Megatron-Core `determine_main_replica_uniform_distribution`. `megackpt.save` plans by itself, also
    parts of shards; this is for users' strategies.
    """
    size = dist.get_world_size(parallelization_group) if dist.is_initialized() else 1
    if size == 1:
        return None
    own = [x.without_data() for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=parallelization_group)
    ranks, shards, with_main = _owners(gathered)
    here = set(ranks) if ignore_groups else with_main
    ranks = {shard: owners for shard, owners in ranks.items() if shard in here}
    sizes = {shard: math.prod(shards[shard].local_shape) * shards[shard].dtype.itemsize for shard in ranks}
    chosen = distribute_shards_to_ranks(ranks, sizes, size, here - with_main)
    return ShardDistribution(chosen, here, shards, ranks)


def _owners(
    tensors_of_ranks: Sequence[Sequence[ShardedTensor]],
) -> tuple[dict[Any, list[int]], dict[Any, ShardedTensor], set[Any]]:
    """Return the ranks with each shard, one of its tensors, and the shards whose main replica is here."""
    ranks: dict[Any, list[int]] = {}
    shards: dict[Any, ShardedTensor] = {}
    with_main: set[Any] = set()
    for rank, tensors in enumerate(tensors_of_ranks):
        for tensor in tensors:
            shard = shard_id(tensor)
            owners = ranks.setdefault(shard, [])
            if rank not in owners:  # a rank may own a shard twice, for example a tied weight
                owners.append(rank)
            shards.setdefault(shard, tensor)
            if is_main_replica(tensor.replica_id):
                with_main.add(shard)
    return ranks, shards, with_main


def shard_id(tensor: ShardedTensor) -> tuple[str, tuple[int, ...], tuple[int, int] | None]:
    """Return what is equal for the same shard on several ranks: key, offset and flat range."""
    flat = tensor.flattened_range
    return (tensor.key, tuple(tensor.global_offset), None if flat is None else (flat.start, flat.stop))


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine keeps a tensor in 8 bits, by its class; none is imported."""
    return any(
        cls.__module__.startswith("transformer_engine") and "Float8" in cls.__name__
        for cls in type(tensor).__mro__
    )


exchange_by_distribution = unsupported_name("exchange_by_distribution", **_PLANNED)
exchange_loaded_objects_gather_object = unsupported_name("exchange_loaded_objects_gather_object", **_PLANNED)
exchange_loaded_tensors_broadcast = unsupported_name("exchange_loaded_tensors_broadcast", **_PLANNED)
exchange_loaded_tensors_gather_object = unsupported_name("exchange_loaded_tensors_gather_object", **_PLANNED)
exchange_loaded_tensors_gather_rounds = unsupported_name("exchange_loaded_tensors_gather_rounds", **_PLANNED)
