"""Choices of the blocks of a GPT: parameters at every layout, initial values, windows, and wrong values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megackpt.errors import DeclarationError
from megackpt.parallel import ParallelGroups, ParallelLayout
from models import (
    GPT,
    AttentionConfig,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
    init_weights,
)
from models.blocks import SelfAttention
from models.blocks.full_attention import CrossAttention, FullAttention
from models.stage import Stage
from tests.support.gpt import FAMILIES, SMALL_GPT, as_family, joined

ONE = ParallelGroups.create(ParallelLayout())
LAYOUTS = [
    ParallelLayout(tp=4),
    ParallelLayout(tp=2, pp=2, dp=2),
    ParallelLayout(pp=2, vpp=2),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_have_equal_values_and_one_main_replica_at_every_layout(
    layout: ParallelLayout, family: str
) -> None:
    config = as_family(SMALL_GPT, family)
    expected, _ = joined(config, ParallelLayout())
    actual, covered = joined(config, layout)
    assert actual.keys() == expected.keys()
    for key, whole in expected.items():
        assert torch.equal(actual[key][: len(whole)], whole), key
        assert torch.all(covered[key] == 1), key


def test_norms_start_as_the_identity_and_sinks_and_positions_at_random() -> None:
    gemma, gpt2, sinks = (joined(as_family(SMALL_GPT, family), ParallelLayout())[0] for family in FAMILIES)
    norms = [key for key in gemma if "layernorm" in key]
    assert len(norms) == 7  # 4 of a layer, 2 of its heads, 1 at the end
    assert all(torch.count_nonzero(gemma[key]) == 0 for key in norms)
    assert torch.all(gpt2["decoder.final_layernorm.weight"] == 1)
    assert torch.count_nonzero(gpt2["decoder.final_layernorm.bias"]) == 0
    assert torch.all(gpt2["embedding.position_embeddings.weight"] != 0)
    assert sinks["decoder.layers.self_attention.softmax_offset"].shape == (4, 4)
    assert torch.all(sinks["decoder.layers.self_attention.softmax_offset"] != 0)


@pytest.mark.parametrize(("family", "last"), [("gemma", 4), ("gpt2", 7), ("gpt-oss", 4)])
def test_a_token_is_seen_by_those_whose_window_it_is_in(family: str, last: int) -> None:
    config = as_family(SMALL_GPT, family)
    if config.attention.window is not None:
        config = replace(config, attention=replace(config.attention, window=SlidingWindow(size=3)))
    model = GPT(replace(config, num_layers=1), ONE)
    init_weights(model, seed=3)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 2] = 12
    differs = (model(tokens) != model(changed)).any(dim=-1)[:, 0].tolist()  # of [s, b, vocab]
    assert differs == [2 <= position <= last for position in range(8)]


@pytest.mark.parametrize(
    ("choices", "sinks"),
    [
        ({"softcap": 1e4}, None),  # scores are below 1, where tanh(x / 1e4) * 1e4 is x
        ({"sinks": True}, -1e4),
    ],
)
def test_attention_as_written_out_is_the_fused_one_if_its_choices_change_nothing(
    choices: dict[str, object], sinks: float | None
) -> None:
    window = SlidingWindow(size=3)
    fused, written_out = (
        SelfAttention(Stage(config=replace(SMALL_GPT, attention=attention), groups=ONE))
        for attention in (
            AttentionConfig(window=window, scale=0.3),
            AttentionConfig(window=window, scale=0.3, **choices),
        )
    )
    written_out.load_state_dict(fused.state_dict(), strict=False)
    if sinks is not None:
        written_out.softmax_offset.data.fill_(sinks)
    x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(written_out(x), fused(x), rtol=1e-4, atol=1e-6)


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    config = replace(SMALL_GPT, attention=AttentionConfig(sinks=True, qkv_bias=False, output_bias=False))
    attention = SelfAttention(Stage(config=config, groups=ONE))
    x = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0))  # one token sees itself only
    attention.softmax_offset.data.fill_(-1e4)
    alone = attention(x)
    attention.linear_qkv.weight.data[:16] = 0.0  # no queries: all scores are 0
    attention.softmax_offset.data.fill_(math.log(3.0))  # exp(0) of exp(0) + 3
    torch.testing.assert_close(attention(x), alone / 4)


DYNAMIC = RotaryConfig(fraction=0.5, scaling=DynamicScaling(factor=2.0, original_length=8))


def _with_window(**choices: object) -> AttentionConfig:
    return AttentionConfig(window=SlidingWindow(size=2, **choices))


@pytest.mark.parametrize(
    ("kind", "choices", "message"),
    [
        (NormConfig, {"kind": "batch"}, r"kind is 'batch'.*'rms' or 'layer'"),
        (NormConfig, {"kind": "layer", "zero_centred": True}, r"zero_centred is for kind 'rms' only"),
        (RotaryConfig, {"base": 0.0}, r"base is 0\.0.*larger than 1"),
        (RotaryConfig, {"fraction": 1.5}, r"fraction is 1\.5.*\(0, 1\]"),
        (RotaryConfig, {"scaling": LinearScaling(factor=0.0)}, r"factor 0\.0; give a positive"),
        (
            Llama3Scaling,
            {"factor": 2.0, "low_frequency_factor": 4.0, "high_frequency_factor": 4.0, "original_length": 8},
            r"high_frequency_factor is 4\.0.*larger than low_frequency_factor, 4\.0",
        ),
        (SlidingWindow, {"size": 0}, r"size is 0.*at least 1"),
        (AttentionConfig, {"head_dim": 0}, r"head_dim is 0.*at least 1"),
        (AttentionConfig, {"softcap": math.inf}, r"softcap is inf.*positive"),
        (MLPConfig, {"activation": "tanh"}, r"activation is 'tanh'.*silu, gelu"),
    ],
)
def test_choices_that_there_are_not_raise_an_error(
    kind: type, choices: dict[str, object], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        kind(**choices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_softcap": 0.0}, r"logit_softcap is 0\.0.*positive"),
        ({"positions": LearnedPositions(count=7)}, r"7 learned positions, but seq_length is 8"),
        ({"positions": RotaryConfig(fraction=0.75)}, r"rotate 3 of the 4 dims of a head.*another fraction"),
        ({"positions": RotaryConfig(fraction=0.2)}, r"rotate 0 of the 4 dims.*at least 2"),
        ({"positions": DYNAMIC}, r"rotate 2 of the 4 dims.*at least 4"),
        ({"attention": AttentionConfig(head_dim=5)}, r"rotate 5 of the 5 dims"),
        ({"attention": _with_window(rotary=RotaryConfig(fraction=0.75))}, r"rotate 3 of the 4 dims"),
        ({"attention": _with_window(layers=(True,) * 3)}, r"layers has 3 layers, but num_layers is 4"),
    ],
)
def test_choices_that_do_not_fit_the_sizes_raise_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        replace(SMALL_GPT, **changes)


@pytest.mark.parametrize("block", [FullAttention, CrossAttention])
@pytest.mark.parametrize(
    "choice", [{"output_gate": True}, {"qk_norm": True}, {"window": SlidingWindow(size=2)}]
)
def test_attention_to_all_tokens_has_no_choices_of_decoders(
    block: type[FullAttention | CrossAttention], choice: dict[str, Any]
) -> None:
    config = replace(SMALL_GPT, attention=AttentionConfig(**choice))
    with pytest.raises(DeclarationError, match=f"{block.__name__} has no {next(iter(choice))}"):
        block(Stage(config=config, groups=ONE))
