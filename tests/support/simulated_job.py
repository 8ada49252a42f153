"""One small job, simulated and real: as declarations, and as a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt.comm import Group
from megackpt.mapping import ShardedStateDict
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout, RoutingOptions
from megackpt.simulation import ModelSizes
from megackpt.testing.world import SimulatedWorld
from models import GPTConfig, MoEConfig, build_gpt

BUCKET = 20_000  # elements: several parameters in some buckets, one in others

SIZES = ModelSizes(vocab_size=300, hidden_size=64, num_layers=3, num_heads=4, ffn_size=192, query_groups=2)
TIED = replace(SIZES, tied_embeddings=True, linear_bias=True)


def real_state(sizes: ModelSizes, layout: ParallelLayout, rank: int) -> ShardedStateDict:
    """What a rank that trains the model would save."""
    groups = ParallelGroups.offline(layout, rank)
    config = GPTConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        ffn_hidden_size=sizes.ffn_size,
        num_query_groups=sizes.query_groups,
        tied_embeddings=sizes.tied_embeddings,
        linear_bias=sizes.linear_bias,
        params_dtype=getattr(torch, sizes.dtype),
        moe=_experts(sizes),
    )
    model = build_gpt(config, groups)
    optimizer = DistributedOptimizer(
        model.parameters(), lambda g: torch.optim.AdamW(g), groups, bucket_size=BUCKET
    )
    declared = model.sharded_state_dict()
    state: dict[str, Any] = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    return state


def _experts(sizes: ModelSizes) -> MoEConfig | None:
    experts = sizes.experts
    if experts is None:
        return None
    is_routed = [int(layer >= experts.dense_layers) for layer in range(sizes.num_layers)]
    return MoEConfig(
        num_experts=experts.count,
        ffn_hidden_size=experts.ffn_size,
        routing=RoutingOptions(bias_rate=1e-3 if experts.router_bias else None),
        shared_ffn_hidden_size=experts.shared_ffn_size,
        layer_freq=tuple(is_routed) if experts.dense_layers else 1,
    )


def save_for_real(sizes: ModelSizes, layout: ParallelLayout, directory: Path) -> None:
    """Save what all ranks would, with ranks as threads."""

    def save(group: Group) -> None:
        # Models that are built for themselves have replicas with values of their own.
        options = megackpt.SaveOptions(sample_replicas=megackpt.Policy.IGNORE)
        megackpt.save(real_state(sizes, layout, group.rank), directory, options=options, group=group)

    SimulatedWorld(layout.world_size).run(save)
