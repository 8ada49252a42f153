"""A small GPT with experts and two adapters, at layouts of all axes."""

from __future__ import annotations

from dataclasses import replace

import torch

from megackpt.mapping import ShardedStateDict
from megackpt.parallel import (
    LoRAConfig,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    adapter_state,
    add_adapters,
    reset_magnitudes,
    stable_seed,
)
from tests.support.gpt import CONFIG as MIXED
from tests.support.gpt import Case, build, tensors_of

# No layout pads this vocabulary. With tp 4, two ranks have each key head.
CONFIG = replace(MIXED, tied_embeddings=False, vocab_size=32, num_query_groups=2)

LAYOUTS = {
    "one": Case(ParallelLayout()),
    "tp2-dp2-ep2-sequence": Case(ParallelLayout(tp=2, dp=2, ep=2), True),
    "dp4-ep2-etp2": Case(ParallelLayout(dp=4, ep=2, etp=2)),
    "tp4-sequence": Case(ParallelLayout(tp=4), True),
    "tp2-pp2-vpp2-ep2-etp1": Case(ParallelLayout(tp=2, pp=2, vpp=2, ep=2, etp=1), True),
    "cp2-pp2-uneven": Case(ParallelLayout(cp=2, pp=2), stages="Ettt|tL"),
}

ADAPTERS = {
    # Components of a fused layer with matrices of their own, and DoRA.
    "attention": LoRAConfig(
        rank=8, targets=("linear_qkv.v", "linear_qkv.q", "linear_proj"), alpha=16, dora=True
    ),
    # One matrix for all components, of dense layers, experts and shared experts; replicated layers.
    "mlp": LoRAConfig(rank=16, targets=("linear_fc1", "linear_fc2"), alpha=8, rank_stabilised=True),
}


def build_with_adapters(name: str, groups: ParallelGroups, *, seed: int) -> ModelChunks:
    """Return this rank's model with adapters; the weights of a seed, and initial values of adapters."""
    model = build(LAYOUTS[name], CONFIG, groups, seed=seed)
    for adapter, config in ADAPTERS.items():
        add_adapters(model, config, groups, name=adapter, seed=5)
        reset_magnitudes(model, adapter)
    return model


def randomise(state: ShardedStateDict) -> None:
    """Give B and the magnitudes random values, so that each adapter changes the outputs."""
    for tensor in tensors_of(adapter_state(state)):
        if ".linear_in." in tensor.key:
            continue
        generator = torch.Generator().manual_seed(stable_seed("random", tensor.key))
        whole = torch.randn(tensor.global_shape, generator=generator) * 0.1
        with torch.no_grad():
            tensor.data.add_(whole[tensor.global_slice()])
