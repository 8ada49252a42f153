"""GPT as every rank declares it, with all choices of its blocks: initial weights, coverage and marks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megackpt import DeclarationError
from megackpt.training.parallel import (
    MicroBatch,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    StageTable,
    forward_backward,
)
from megackpt.training.parallel.attributes import is_marked
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
    build_gpt,
    init_weights,
)
from models.blocks import SelfAttention
from models.blocks.attention import rotate, rotation
from models.blocks.full_attention import CrossAttention, FullAttention
from models.stage import Stage
from tests.support.gpt import FAMILIES, SMALL_GPT, SMALL_GPT_MIXED, SMALL_GPT_MOE, as_family, joined

CONFIG = replace(SMALL_GPT, num_query_groups=4)

ONE = ParallelGroups.create(ParallelLayout())
LAYOUTS = [
    *(ParallelLayout(tp=4), ParallelLayout(pp=4), ParallelLayout(pp=3), ParallelLayout(pp=2, vpp=2)),
    *(ParallelLayout(tp=2, pp=2, dp=2), ParallelLayout(tp=2, cp=2, pp=2), ParallelLayout(cp=2, dp=2)),
]
OF_EXPERTS = [
    *(ParallelLayout(tp=4), ParallelLayout(dp=8, ep=8), ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=4)),
    ParallelLayout(tp=2, dp=2, pp=2, vpp=2, ep=4, etp=1),
]
OF_CHOICES = [LAYOUTS[0], LAYOUTS[4], LAYOUTS[3]]
MODELS = {
    "untied": (replace(CONFIG, tied_embeddings=False), LAYOUTS),
    "tied": (CONFIG, LAYOUTS),
    "experts": (SMALL_GPT_MOE, OF_EXPERTS),
    "some experts": (SMALL_GPT_MIXED, OF_EXPERTS),
    **{family: (as_family(SMALL_GPT, family), OF_CHOICES) for family in FAMILIES},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout}")
        for name, (_, layouts) in MODELS.items()
        for layout in layouts
    ],
)
def test_initial_weights_are_equal_at_every_layout_and_each_element_is_saved_once(
    name: str, layout: ParallelLayout
) -> None:
    config = MODELS[name][0]
    expected, _ = joined(config, ParallelLayout())
    actual, covered = joined(config, layout)
    assert actual.keys() == expected.keys()
    for key, whole in expected.items():
        assert torch.equal(actual[key][: len(whole)], whole), key
        assert torch.count_nonzero(actual[key][len(whole) :]) == 0  # the vocabulary is padded
        assert torch.all(covered[key] == 1), key


def test_keys_are_free_of_layer_numbers_and_stages() -> None:
    model = GPT(
        CONFIG,
        ParallelGroups.offline(ParallelLayout(pp=2), 1),
        stages=StageTable.from_string("Ettt|tL", pp=2),
    )
    state = model.sharded_state_dict("model.")
    assert list(state) == [f"model.{name}" for name in model.state_dict()]
    proj = state["model.decoder.layers.0.self_attention.linear_proj.weight"]
    assert proj.key == "model.decoder.layers.self_attention.linear_proj.weight"
    assert (proj.global_shape, proj.global_offset) == ((4, 16, 16), (3, 0, 0))
    assert state["model.output_layer.weight"].key == "model.embedding.word_embeddings.weight"


def test_chunks_of_a_stage_have_names_of_their_own_and_global_keys() -> None:
    groups = ParallelGroups.offline(ParallelLayout(pp=2, vpp=2), 1)
    model = build_gpt(CONFIG, groups, stages=StageTable.from_string("Et|t||ttL", pp=2))
    state = model.sharded_state_dict("model.")
    assert list(state) == [f"model.{name}" for name in model.state_dict()]
    projections = [e for e in state.values() if e.key.endswith("linear_proj.weight")]
    assert {e.key for e in projections} == {"model.decoder.layers.self_attention.linear_proj.weight"}
    assert [e.global_offset[0] for e in projections] == [1, 2, 3]
    assert "model.0.decoder.layers.0.self_attention.linear_proj.weight" in state
    first, last = model
    assert (first.output_layer, first.decoder.final_layernorm) == (None, None)
    assert last.output_layer is not None
    assert is_marked(last.output_layer.weight, "shared_embedding")
    assert is_marked(last.output_layer.weight, "is_duplicate")
    assert state["model.1.output_layer.weight"].key == "model.embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ("Ett|tL", r"3 layers, but the model has 4"),
        ("Et|t|t|tL", r"one for pp=2, vpp=2 stages, but the layout"),
    ],
)
def test_a_table_of_another_model_or_layout_is_rejected(table: str, error: str) -> None:
    groups = ParallelGroups.offline(ParallelLayout(pp=2), 0)
    with pytest.raises(DeclarationError, match=error):
        build_gpt(CONFIG, groups, stages=StageTable.from_string(table, pp=2))


def test_weights_on_the_residual_path_start_smaller() -> None:
    model = GPT(replace(CONFIG, hidden_size=128, ffn_hidden_size=512), ONE)
    init_weights(model, seed=1)
    layer = model.decoder.layers.get_submodule("2")
    # 128 * 128 numbers: the sample deviation lies within 5 * std / sqrt(2n) = 2.8 % of std.
    for name, expected in (("linear_qkv", 0.02), ("linear_proj", 0.02 / math.sqrt(8))):
        weight = layer.get_parameter(f"self_attention.{name}.weight")
        assert weight.std().item() == pytest.approx(expected, rel=0.028)
    assert torch.equal(layer.get_parameter("input_layernorm.weight"), torch.ones(128))
    assert torch.count_nonzero(layer.get_parameter("mlp.linear_fc1.bias")) == 0


def test_seed_and_layer_change_the_initial_weights() -> None:
    a, b = GPT(CONFIG, ONE), GPT(CONFIG, ONE)
    init_weights(a, seed=1)
    init_weights(b, seed=2)
    name = "mlp.linear_fc2.weight"
    first, second = (a.decoder.layers.get_submodule(i).get_parameter(name) for i in "01")
    assert not torch.equal(first, second)
    assert not torch.equal(first, b.decoder.layers.get_submodule("0").get_parameter(name))


def test_half_precision_weights_are_the_rounded_full_ones() -> None:
    full, half = GPT(CONFIG, ONE), GPT(replace(CONFIG, params_dtype=torch.bfloat16), ONE)
    init_weights(full, seed=1)
    init_weights(half, seed=1)
    for a, b in zip(full.parameters(), half.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_a_parameter_without_an_initial_rule_raises_an_error() -> None:
    model = GPT(CONFIG, ONE)
    model.gain = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(DeclarationError, match=r"'gain'.*no rule.*models/init\.py") as caught:
        init_weights(model, seed=1)
    assert caught.value.key == "gain"


def test_tied_copies_are_marked_for_the_optimizer_on_first_and_last_stage_only() -> None:
    assert [name for name, p in GPT(CONFIG, ONE).named_parameters() if p.shape == (13, 16)] == [
        "embedding.word_embeddings.weight"  # one stage holds it once
    ]
    marks = {}
    for rank in range(3):
        model = GPT(CONFIG, ParallelGroups.offline(ParallelLayout(pp=3), rank))
        for flag in ("shared_embedding", "is_duplicate"):
            marks[rank, flag] = [name for name, p in model.named_parameters() if is_marked(p, flag)]
    assert marks[0, "shared_embedding"] == ["embedding.word_embeddings.weight"]
    assert marks[2, "shared_embedding"] == marks[2, "is_duplicate"] == ["output_layer.weight"]
    assert marks[0, "is_duplicate"] == marks[1, "shared_embedding"] == marks[1, "is_duplicate"] == []


def test_a_token_does_not_see_the_ones_behind_it() -> None:
    model = GPT(CONFIG, ONE)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 12
    before, after = model(tokens), model(changed)  # [s, b, vocab]
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5])


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 9, 8)
    turn = rotation(RotaryConfig(base=100.0), 8, torch.arange(9), 9)
    scores = rotate(q, turn) @ rotate(k, turn).transpose(-1, -2)  # [1, 1, s, s]
    for distance in range(9):
        diagonal = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_grouped_queries_and_dropout_path_compute_the_same_attention() -> None:
    """The written-out attention that dropout needs is the fused one if nothing is dropped."""
    config = replace(CONFIG, num_query_groups=2, dropout=0.5)
    model = GPT(config, ONE, ParallelRng(1, ONE))
    attention = model.decoder.layers.get_submodule("0").get_submodule("self_attention")
    x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
    fused = attention.eval()(x)
    attention.train()
    attention.dropout.forward = lambda weights: weights
    torch.testing.assert_close(attention(x), fused)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_training_continues_bit_for_bit_after_the_streams_are_restored(
    device: str, dtype: torch.dtype
) -> None:
    rng = ParallelRng(5, ONE, device=device)
    model = GPT(replace(CONFIG, dropout=0.3, params_dtype=dtype), ONE, rng, device=device)
    init_weights(model, seed=1)
    tokens = torch.arange(8, device=device).unsqueeze(0)
    model(tokens, tokens)
    state = rng.sharded_state_dict()["rng_state"].data
    expected = [model(tokens, tokens).item() for _ in range(3)]
    rng.reseed(77)
    assert model(tokens, tokens).item() != expected[0]
    rng.load_state_dict(state)
    assert [model(tokens, tokens).item() for _ in range(3)] == expected


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_tp_ranks_agree_on_what_is_dropped_exactly_where_they_hold_the_same(sequence_parallel: bool) -> None:
    attention, residual, embedding = [], [], []
    for rank in range(2):
        groups = ParallelGroups.offline(ParallelLayout(tp=2), rank)
        config, rng = replace(CONFIG, dropout=0.5), ParallelRng(1, groups)
        model = GPT(config, groups, rng, sequence_parallel=sequence_parallel)
        layer = model.decoder.layers.get_submodule("0")
        for drawn, name in ((attention, "self_attention.dropout"), (residual, "dropout")):
            drawn.append(layer.get_submodule(name)(torch.ones(64)))
        embedding.append(model.get_submodule("embedding.dropout")(torch.ones(64)))
    assert not torch.equal(*attention)
    assert torch.equal(*residual) != sequence_parallel
    assert torch.equal(*embedding) != sequence_parallel


def test_one_stage_accumulates_the_gradient_of_the_mean_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [MicroBatch(*torch.randint(0, 13, (2, 2, 8), generator=generator).unbind()) for _ in range(3)]
    model, reference = GPT(CONFIG, ONE), GPT(CONFIG, ONE)
    for network in (model, reference):
        init_weights(network, seed=1)
    losses = forward_backward(model, batches, ONE, loss_scale=8.0)
    expected = torch.stack([reference(*batch) for batch in batches])
    expected.mean().backward()
    assert torch.equal(losses, expected.detach())
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        # The reference adds up in another order: 3 micro-batches of 16 tokens.
        torch.testing.assert_close(a.grad / 8.0, b.grad, rtol=1e-5, atol=1e-7)


def test_a_layout_that_does_not_fit_the_model_raises_an_error_with_all_reasons() -> None:
    config = replace(CONFIG, num_heads=6, hidden_size=24, num_query_groups=6, ffn_hidden_size=6)
    with pytest.raises(DeclarationError) as caught:
        GPT(config, ParallelGroups.offline(ParallelLayout(tp=4, cp=8, pp=5), 0))
    for reason in (
        "num_heads 6",
        "num_query_groups 6 is neither",
        "ffn_hidden_size 6",
        "tp=4",
        "seq_length 8 is not a multiple of 2 x cp=8",
        "num_layers 4",
        "pp=5",
        "Change either",
    ):
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("cp", "tokens", "message"),
    [
        (1, 9, r"9 tokens, but .*seq_length is 8. Cut them, or"),
        (2, 8, r"16 tokens \(8 on each of 2 ranks of cp\).* its context_share"),
    ],
)
def test_a_sequence_longer_than_the_model_is_made_for_raises_an_error(
    cp: int, tokens: int, message: str
) -> None:
    model = GPT(CONFIG, ParallelGroups.offline(ParallelLayout(cp=cp), 0))
    with pytest.raises(DeclarationError, match=message):
        model(torch.zeros(1, tokens, dtype=torch.int64))


def test_a_rank_of_cp_receives_activations_of_its_own_tokens() -> None:
    groups = ParallelGroups.offline(ParallelLayout(cp=2, tp=2, pp=2), 5)
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    assert GPT(CONFIG, groups).activation_buffer(tokens).shape == (4, 3, 16)
    assert GPT(CONFIG, groups, sequence_parallel=True).activation_buffer(tokens).shape == (2, 3, 16)


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
        ({"vocab_size": 0}, r"vocab_size is 0.*at least 1"),
        ({"num_heads": 3, "num_query_groups": 3}, r"hidden_size 16.*num_heads 3.*multiple of 6"),
        ({"num_query_groups": 3}, r"num_query_groups 3 does not divide num_heads 4.*divisor"),
        ({"ffn_hidden_size": 0}, r"ffn_hidden_size is 0"),
        ({"dropout": 1.0}, r"dropout is 1\.0.*\[0, 1\)"),
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
def test_sizes_and_choices_that_make_no_model_raise_an_error(
    changes: dict[str, object], message: str
) -> None:
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
