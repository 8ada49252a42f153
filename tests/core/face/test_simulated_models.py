"""Models by their sizes: known totals, and layouts that can hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megackpt.errors import DeclarationError
from megackpt.metadata import ArraySpec, ChunkTable, pad_shapes
from megackpt.parallel import ParallelLayout
from megackpt.simulation import (
    PRESETS,
    ModelSizes,
    StoredCheckpoint,
    build_model,
    check_layout,
    parse_layout,
    read_sizes,
    simulate_load,
    simulate_save,
)
from megackpt.simulation.arrays import job_arrays
from megackpt.simulation.layout import layers_of_stages
from megackpt.simulation.sizes import sizes_from_json
from megackpt.simulation.stored import model_of

# Exact totals of the weights that were published, and what the papers round them to.
TOTALS = {
    "llama3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B
    "llama3-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B; "405B"
    "llama3-1b": 1_235_814_400,  # meta-llama/Llama-3.2-1B
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1; "47B"
    "deepseek-v3": 671_026_419_200,  # "671B"; the module for further tokens is not among them
    # Not published; "175.0B" and "125M". 12 L h^2 + 13 L h + (V + positions) h + 2 h, sizes of table 2.1.
    "gpt3-175b": 174_604_259_328,
    "gpt-125m": 125_226_240,
}


def test_presets_have_the_published_numbers_of_parameters() -> None:
    assert {name: build_model(sizes).numel for name, sizes in PRESETS.items()} == TOTALS


def test_an_optimizer_adds_twelve_bytes_for_each_parameter_of_two() -> None:
    sizes = PRESETS["llama3-8b"]  # no padding at tp 1: 128256 rows are a multiple of 128
    arrays = job_arrays(build_model(sizes), tp=1)
    counts = 4 * sum(spec.numel for spec in arrays.specs if ".step." in spec.key)
    assert counts == 4 * (32 * 6 + 3)
    assert arrays.nbytes == 14 * TOTALS["llama3-8b"] + counts


def test_vocabularies_are_padded_to_what_tp_divides() -> None:
    shapes = {s.key: s.global_shape for s in job_arrays(build_model(PRESETS["llama3-8b"]), tp=8).specs}
    assert shapes["output_layer.weight"] == (129024, 4096)
    assert shapes["optimizer.state.exp_avg.output_layer.weight"] == (129024, 4096)


def test_first_and_last_stage_have_a_layer_less_where_the_ends_count() -> None:
    # Dubey et al. 2024, section 3.3.2.
    counts = [len(owned) for owned in layers_of_stages(126, ParallelLayout(pp=16), ends_count=True)]
    assert counts == [7] + [8] * 14 + [7]
    counts = [len(owned) for owned in layers_of_stages(126, ParallelLayout(pp=16), ends_count=False)]
    assert counts == [8] * 14 + [7] * 2
    assert [len(owned) for owned in layers_of_stages(5, ParallelLayout(), ends_count=True)] == [5]


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp8,pp16,dp128", ParallelLayout(tp=8, pp=16, dp=128)),
        ("TP8, PP16, world=16384", ParallelLayout(tp=8, pp=16, dp=128)),
        ("dp8,ep4", ParallelLayout(dp=8, ep=4)),
        ("world4", ParallelLayout(dp=4)),
        ("tp2,cp2,pp2,vpp2,ep4,etp1,world16", ParallelLayout(tp=2, cp=2, pp=2, dp=2, vpp=2, ep=4, etp=1)),
    ],
)
def test_layouts_are_read_as_they_are_written(text: str, layout: ParallelLayout) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an axis"),
        ("tp8,xp2", "'xp2' is not an axis"),
        ("tp8,tp4", "names an axis twice"),
        ("tp0", "tp=0.*at least 1"),
        ("tp3,pp2,world16", r"16 ranks cannot be divided so; tp=3 x cp=1 x pp=2 x dp=2 are 12"),
        ("tp2,dp3,world8", "8 ranks cannot be divided"),
        ("dp6,ep4", "ep=4 = 4 does not divide"),
        ("tp8,pp512,dp128", "at most 131072"),
    ],
)
def test_a_layout_that_cannot_be_raises_an_error(text: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    ("preset", "layout", "message"),
    [
        ("llama3-8b", "tp64", r"num_heads 32 is not a multiple of tp=64"),
        ("gpt3-175b", "tp64", r"num_heads 96 is not a multiple of tp=64"),
        ("llama3-8b", "pp64", r"32 layers are fewer than pp=64"),
        ("llama3-8b", "dp2,ep2", r"no experts to share by ep=2"),
        ("mixtral-8x7b", "dp16,ep16", r"8 experts cannot be shared by ep=16"),
        ("gpt-125m", "tp5", r"linear_fc1.weight has 3072 along the dim that tp=5 cuts"),
    ],
)
def test_a_layout_that_does_not_fit_a_model_raises_an_error(preset: str, layout: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        check_layout(build_model(PRESETS[preset]), parse_layout(layout))


def test_query_groups_divide_tp_or_the_other_way_round() -> None:
    check_layout(build_model(PRESETS["llama3-8b"]), parse_layout("tp16"))
    sizes = ModelSizes(vocab_size=64, hidden_size=24, num_layers=2, num_heads=12, ffn_size=48, query_groups=4)
    with pytest.raises(DeclarationError, match="neither of query_groups 4 and tp=6 divides the other"):
        check_layout(build_model(sizes), parse_layout("tp6"))


def test_sizes_come_back_from_json(tmp_path: Path) -> None:
    for sizes in PRESETS.values():
        path = tmp_path / "model.json"
        path.write_text(json.dumps(sizes.to_json()))
        assert read_sizes(path) == sizes


SMALL = {"vocab_size": 64, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "ffn_size": 16}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hiden_size": 8}, r"unknown fields \['hiden_size'\]"),
        ({"ffn_size": None}, r"of another type \['ffn_size'\]"),
        ({"gated": "yes"}, r"of another type \['gated'\]"),
        ({"experts": {"count": 4}}, r"model, experts: .*missing ones \['ffn_size'\]"),
        ({"experts": 8}, r"another type \['experts'\]"),
        (
            {"experts": {"count": 4, "ffn_size": 8, "dense_layers": 3}},
            "dense_layers 3 is more than num_layers 2",
        ),
        ({"experts": {"count": 0, "ffn_size": 8}}, "Experts.count is 0"),
        ({"query_groups": 3}, "query_groups 3 does not divide num_heads 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dtype": "bf16"}, "'bf16' is none of"),
    ],
)
def test_a_description_that_is_wrong_raises_an_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        sizes_from_json({**SMALL, **changed}, where="model")


def test_a_file_that_is_no_description_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("text", "absent"):
        with pytest.raises(DeclarationError, match=f"{name}: not a description of a model"):
            read_sizes(tmp_path / name)
    with pytest.raises(DeclarationError, match="a list where an object should be"):
        sizes_from_json([], where="model")


def test_what_is_given_makes_sizes() -> None:
    assert sizes_from_json(SMALL, where="model") == ModelSizes(
        vocab_size=64, hidden_size=8, num_layers=2, num_heads=2, ffn_size=16
    )


def arrays_of(*shapes: tuple[str, tuple[int, ...]]) -> ChunkTable:
    """Whole arrays of bfloat16 in one chunk each, as a single process saves them."""
    specs = tuple(ArraySpec(key, "bfloat16", shape) for key, shape in sorted(shapes))
    dims = max(len(spec.global_shape) for spec in specs)
    numel = np.array([spec.numel for spec in specs])
    return ChunkTable(
        specs,
        np.arange(len(specs)),
        np.zeros((len(specs), dims), np.int64),
        pad_shapes([spec.global_shape for spec in specs], dims, fill=1),
        np.zeros(len(specs), np.int64),
        numel,
        2 * numel,
    )


@pytest.mark.parametrize("preset", ["llama3-1b", "gpt-125m", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("states", [None, ()])
def test_a_model_is_recognised_by_the_arrays_of_one_process(
    preset: str, states: tuple[str, ...] | None
) -> None:
    # A multiple of 128, so that no padding is taken for a part of the vocabulary.
    model = build_model(replace(PRESETS[preset], num_layers=5, vocab_size=1024))
    _, plan = simulate_save(model, ParallelLayout(), states=states)
    described, found_states = model_of(plan.table)
    assert described.layers == 5
    assert {w.key: (w, axes) for w, axes in described.weights()} == {
        # Without an optimizer nothing tells a buffer from a parameter.
        w.key: (replace(w, is_trained=w.is_trained or states == ()), axes)
        for w, axes in model.weights()
    }
    assert set(found_states) == (set() if states == () else {"fp32_param", "exp_avg", "exp_avg_sq"})


def test_layers_with_keys_of_their_own_are_recognised_by_their_numbers() -> None:
    layers = [
        array
        for i in range(3)
        for array in (
            (f"model.layers.{i}.mlp.down_proj.weight", (8, 32)),
            (f"model.layers.{i}.self_attn.q_proj.weight", (8, 8)),
            (f"model.layers.{i}.input_layernorm.weight", (8,)),
        )
    ]
    table = arrays_of(*layers, ("model.embed_tokens.weight", (64, 8)), ("lm_head.weight", (64, 8)))
    model, _ = model_of(table)
    cuts = {weight.key.rpartition(".layers.")[2]: weight.tp_dim for weight, _ in model.weights()}
    assert model.layers == 3
    assert cuts["2.mlp.down_proj.weight"] == 1
    assert cuts["0.self_attn.q_proj.weight"] == 0
    assert cuts["1.input_layernorm.weight"] is None
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == 0
    stored = StoredCheckpoint(table, np.zeros(len(table), np.int64), 1, "x")
    load = simulate_load(model, parse_layout("tp2,pp3"), stored, states=())
    # Norms are needed on both tp ranks, all else once.
    assert load.total_needed == int(table.nbytes.sum()) + 2 * 3 * 8
