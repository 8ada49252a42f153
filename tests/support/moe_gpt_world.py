"""A small GPT with a mixture of experts, and layouts of 8 ranks over all axes for tests of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel import (
    LatentSizes,
    MambaSizes,
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RoutingOptions,
    StageTable,
    context_share,
)
from models import (
    AttentionConfig,
    DeltaNetConfig,
    GPTConfig,
    MLPConfig,
    MoEConfig,
    MTPConfig,
    NoPositions,
    NormConfig,
    RotaryConfig,
    build_gpt,
    init_weights,
)

MICRO_BATCHES = 8  # in the whole job, divided among dp

CONFIG = GPTConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_query_groups=4,
    ffn_hidden_size=24,
    seq_length=8,
    make_vocab_divisible=1,
    linear_bias=True,
    moe=MoEConfig(
        num_experts=8,
        ffn_hidden_size=16,
        routing=RoutingOptions(
            top_k=3,
            score_function="sigmoid",
            scaling_factor=2.5,
            num_groups=4,
            group_top_k=2,
            balance_loss=0.3,
            z_loss=0.02,
            bias_rate=0.01,
        ),
        shared_ffn_hidden_size=16,
        shared_gate=True,
        layer_freq=(0, 1, 1, 1),
    ),
)
# All layers have experts: the arrays of experts have an axis over layers before that over experts.
ALL_MOE = replace(CONFIG, moe=replace(CONFIG.moe, layer_freq=1))
# Latent attention, a first layer without experts, and two layers for further tokens.
LATENT = replace(
    CONFIG,
    num_query_groups=None,
    attention=AttentionConfig(
        latent=LatentSizes(
            kv_lora_rank=10, q_lora_rank=14, qk_head_dim=3, qk_pos_emb_head_dim=4, v_head_dim=5
        )
    ),
    positions=RotaryConfig(interleaved=True),
    mtp=MTPConfig(num_layers=2),
)
# Layers with a gated delta net, attention with an output gate, and one layer without experts.
DELTA_NET = replace(
    CONFIG,
    linear_bias=False,
    norm=NormConfig(zero_centred=True),
    positions=RotaryConfig(fraction=0.5),
    attention=AttentionConfig(qk_norm=True, output_gate=True),
    delta_net=DeltaNetConfig(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=5),
    moe=replace(CONFIG.moe, layer_freq=1),
    layer_blocks=(("delta_net", "mlp"), ("delta_net", "moe"), ("attention", "moe"), ("delta_net", "moe")),
)
# Mamba-2 mixers in all layers, which are stacked; and layers of all kinds, with experts that are not gated.
# Some layouts have more ranks in tp than there are groups.
MAMBA = replace(
    CONFIG,
    moe=None,
    mamba=MambaSizes(num_heads=8, head_dim=5, state_size=6, num_groups=2, chunk_size=3, bias=True),
    layer_blocks=(("mamba",),) * 4,
)
HYBRID = replace(
    MAMBA,
    positions=NoPositions(),
    mlp=MLPConfig(gated=False, activation="relu_squared"),
    moe=replace(CONFIG.moe, layer_freq=1, gated=False, shared_gate=False),
    layer_blocks=(("mamba",), ("moe",), ("attention", "mlp"), ("mamba", "moe")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A layout and choices that change no result."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    stages: str | None = None
    optimizer: type[MasterOptimizer] = DistributedOptimizer

    def stage_table(self) -> StageTable | None:
        return None if self.stages is None else StageTable.from_string(self.stages, pp=self.layout.pp)


# Of 8 ranks each. Experts of one stage are on 1, 2, 4 or 8 ranks, in 1, 2 or 4 slices, in 1 to 8 copies.
LAYOUTS = {
    "dp8": Case(ParallelLayout(dp=8)),
    "dp8-ep8": Case(ParallelLayout(dp=8, ep=8)),
    "dp8-ep2-etp2": Case(ParallelLayout(dp=8, ep=2, etp=2)),
    "tp2-dp4-ep2": Case(ParallelLayout(tp=2, dp=4, ep=2), True, optimizer=MixedPrecisionOptimizer),
    "tp4-dp2-ep4-etp1": Case(ParallelLayout(tp=4, dp=2, ep=4, etp=1), True),
    "tp8-ep8-etp1": Case(ParallelLayout(tp=8, ep=8, etp=1)),
    "tp2-cp2-dp2-ep2-etp4": Case(ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=4), True),
    "cp2-dp4-ep8": Case(ParallelLayout(cp=2, dp=4, ep=8)),
    "cp4-dp2-ep2": Case(ParallelLayout(cp=4, dp=2, ep=2), optimizer=MixedPrecisionOptimizer),
    "tp2-pp2-dp2-ep2-etp1": Case(ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=1), True),
    "pp4-dp2-ep2": Case(ParallelLayout(pp=4, dp=2, ep=2)),
    "cp2-pp2-vpp2-dp2-ep4": Case(ParallelLayout(cp=2, pp=2, vpp=2, dp=2, ep=4)),
    "tp2-pp2-vpp2-dp2-ep4-etp1-uneven": Case(
        ParallelLayout(tp=2, pp=2, vpp=2, dp=2, ep=4, etp=1),
        stages="E|tt|t|tL",
        optimizer=MixedPrecisionOptimizer,
    ),
    "pp2-dp4-etp2-uneven": Case(ParallelLayout(pp=2, dp=4, etp=2), stages="Ettt|tL"),
}


def micro_batches(groups: ParallelGroups, *, seed: int = 3, count: int = MICRO_BATCHES) -> list[MicroBatch]:
    """Return this dp rank's micro-batches of `count` in the whole job, and of them this cp rank's tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, 0, CONFIG.vocab_size, (2, 8), generator=generator)
    whole = [(draw(), draw()) for _ in range(count)][groups.dp.rank :: groups.dp.size]
    return [MicroBatch(*(context_share(x, groups.cp, dim=1) for x in batch)) for batch in whole]


def build(case: Case, config: GPTConfig, groups: ParallelGroups, *, seed: int) -> ModelChunks:
    """Return the model chunks of this rank with initial weights of a seed."""
    model = build_gpt(config, groups, sequence_parallel=case.sequence_parallel, stages=case.stage_table())
    init_weights(model, seed=seed)
    with torch.no_grad():  # scores far from each other, so that rounding does not change a choice
        for name, param in model.named_parameters():
            if name.endswith("router.weight"):
                param *= 20
    return model


def state_of(model: ModelChunks, optimizer: MasterOptimizer) -> dict[str, Any]:
    """Declare what a checkpoint has of the model and its optimizer."""
    declared = model.sharded_state_dict()
    return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
