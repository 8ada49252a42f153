"""GPTs with other choices than the default ones, and the arrays that all ranks of a layout have together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megackpt.mapping import ShardedLayout, ShardedTensor, is_main_replica
from megackpt.parallel import ModelChunks, ParallelGroups, ParallelLayout
from models import (
    AttentionConfig,
    GPTConfig,
    LearnedPositions,
    Llama3Scaling,
    MLPConfig,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
    build_gpt,
    init_weights,
)

SMALL_GPT = GPTConfig(
    vocab_size=13,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=8,
    seq_length=8,
    make_vocab_divisible=1,
    linear_bias=True,
)
"""A model of few elements. Its heads share keys two by two."""

FAMILIES = ("gemma", "gpt2", "gpt-oss")


def as_family(config: GPTConfig, family: str) -> GPTConfig:
    """Return a config of the same sizes with the choices of a family, and some that go with them.

    Its sequences have at least 4 tokens, and there are 4 layers.
    """
    return {"gemma": _gemma, "gpt2": _gpt2, "gpt-oss": _gpt_oss}[family](config)


def _gemma(config: GPTConfig) -> GPTConfig:
    local = SlidingWindow(size=3, layers=(True, False) * 2, rotary=RotaryConfig(base=100.0))
    return replace(
        config,
        norm=NormConfig(zero_centred=True, after_blocks=True),
        attention=AttentionConfig(head_dim=6, qk_norm=True, scale=0.3, softcap=2.0, window=local),
        mlp=MLPConfig(activation="gelu_tanh"),
        embedding_scale=5.0,
        logit_softcap=3.0,
    )


def _gpt2(config: GPTConfig) -> GPTConfig:
    return replace(
        config,
        positions=LearnedPositions(count=config.seq_length + 3),
        norm=NormConfig(kind="layer"),
        mlp=MLPConfig(gated=False, activation="gelu_tanh"),
    )


def _gpt_oss(config: GPTConfig) -> GPTConfig:
    """Few key heads, which ranks of tp share."""
    scaling = Llama3Scaling(
        factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=4
    )
    return replace(
        config,
        num_query_groups=2,
        linear_bias=False,
        tied_embeddings=False,
        positions=RotaryConfig(fraction=0.5, scaling=scaling),
        attention=AttentionConfig(qkv_bias=True, qk_norm=True, sinks=True, window=SlidingWindow(size=3)),
    )


def _tensors(model: ModelChunks) -> Iterator[ShardedTensor]:
    for entity in model.sharded_state_dict().values():
        yield from entity.tensors() if isinstance(entity, ShardedLayout) else [entity]


def joined(config: GPTConfig, layout: ParallelLayout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Build every rank's model; return the global arrays and how many main replicas hold each element."""
    arrays: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for rank in range(layout.world_size):
        model = build_gpt(config, ParallelGroups.offline(layout, rank))
        init_weights(model, seed=7)
        for t in _tensors(model):
            whole = arrays.setdefault(t.key, torch.full(t.global_shape, float("nan")))
            count = covered.setdefault(t.key, torch.zeros(t.global_shape, dtype=torch.int64))
            assert t.data is not None
            box = t.global_slice()
            known = ~whole[box].isnan()
            assert torch.equal(whole[box][known], t.data.detach()[known]), f"replicas of {t.key} differ"
            whole[box] = t.data.detach()
            count[box] += is_main_replica(t.replica_id)
    return arrays, covered
