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
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.simulation import ModelSizes
from megackpt.testing.world import SimulatedWorld
from models.config import GPTConfig
from models.gpt import GPT

BUCKET = 20_000  # elements: several parameters in some buckets, one in others

SIZES = ModelSizes(vocab_size=300, hidden_size=64, num_layers=3, num_heads=4, ffn_size=192, query_groups=2)
TIED = replace(SIZES, tied_embeddings=True, linear_bias=True)


def real_state(sizes: ModelSizes, layout: ParallelLayout, rank: int) -> ShardedStateDict:
    """What a rank that trains the model would save."""
    where = ParallelLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp)
    groups = ParallelGroups.offline(where, rank)
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
    )
    model = GPT(config, groups)
    optimizer = DistributedOptimizer(
        model.parameters(), lambda g: torch.optim.AdamW(g), groups, bucket_size=BUCKET
    )
    declared = model.sharded_state_dict()
    state: dict[str, Any] = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    return state


def save_for_real(sizes: ModelSizes, layout: ParallelLayout, directory: Path) -> None:
    """Save what all ranks would, with ranks as threads."""

    def save(group: Group) -> None:
        # Models that are built for themselves have replicas with values of their own.
        options = megackpt.SaveOptions(sample_replicas=megackpt.Policy.IGNORE)
        megackpt.save(real_state(sizes, layout, group.rank), directory, options=options, group=group)

    SimulatedWorld(layout.world_size).run(save)
