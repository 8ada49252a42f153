"""Loads and steps in other names and shapes, through maps that are proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import megackpt
from megackpt import (
    Checkpointer,
    CheckpointError,
    DeclarationError,
    KeyRule,
    LoadOptions,
    MapError,
    MismatchError,
    MissingKeyError,
    Policy,
    ShardedObject,
    ShardedTensor,
)
from megackpt.checkpointer import LocalTier
from megackpt.maps import Family, FamilyRules, Rule, family_of, region_map, weights_of
from megackpt.maps.megatron import megatron_map
from megackpt.maps.weights import MASTER

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "tie_word_embeddings": False,
}
TIED = CONFIG | {"tie_word_embeddings": True}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
THEIR_EMBEDDING, THEIR_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def write_folder(
    path: Path, config: Mapping[str, Any] = CONFIG, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, Tensor]:
    """Write a folder of a config; changes are tensors by name, or None for one that is left out."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {
        key: torch.randn(array.stored, generator=generator).to(dtype)
        for key, array in family_of(config).region_map(config).right.items()
    }
    tensors = {key: value for key, value in (tensors | changes).items() if value is not None}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(dict(config)))
    return tensors


def request(config: Mapping[str, Any] = CONFIG, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return NaNs for each of our arrays, one for each layer."""
    left = family_of(config).region_map(config).left
    return {key: torch.full(array.stored, torch.nan, dtype=dtype) for key, array in left.items()}


def declared(key: str, data: Tensor) -> ShardedTensor:
    shape = tuple(data.shape)
    return ShardedTensor(key, data, data.dtype, shape, shape, (0,) * len(shape))


def test_plain_tensors_under_our_names_are_filled_and_returned(tmp_path: Path) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    loaded = megackpt.load(state, tmp_path / "hf", maps="auto")
    assert loaded.keys() == state.keys()
    assert all(loaded[key] is state[key] for key in state)
    assert not any(value.isnan().any() for value in state.values())
    assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
    ours = state["decoder.layers.1.self_attention.linear_qkv.weight.k"]
    assert torch.equal(ours, stored["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("choice", ["llama", family_of(CONFIG), family_of(CONFIG).region_map(CONFIG)])
def test_a_map_is_chosen_by_name_or_given(tmp_path: Path, choice: Any) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    (tmp_path / "hf" / "config.json").unlink()
    megackpt.load(state, tmp_path / "hf", maps=choice, config=CONFIG)
    assert torch.equal(state[OUTPUT], stored[THEIR_OUTPUT])


@pytest.mark.parametrize(
    ("stored", "asked"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_floats_are_cast_to_the_nearest_and_the_report_names_them(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype
) -> None:
    tensors, state = write_folder(tmp_path / "hf", dtype=stored), request(dtype=asked)
    _, report = megackpt.load_with_report(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[EMBEDDING], tensors[THEIR_EMBEDDING].to(asked))
    assert {array.key for array in report.cast} == set(state)
    assert str(stored).removeprefix("torch.") in str(report)
    strict = LoadOptions(rules=(KeyRule(keys=EMBEDDING, cast=Policy.ERROR),))
    with pytest.raises(MismatchError, match=f"'{EMBEDDING}': '{THEIR_EMBEDDING}' is stored as"):
        megackpt.load(state, tmp_path / "hf", maps="auto", options=strict)


def test_a_parameter_and_its_master_are_filled_from_one_array(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf")
    params = {key: declared(key, value) for key, value in request(dtype=torch.bfloat16).items()}
    masters = {key: declared(MASTER + key, value) for key, value in request().items()}
    moment = declared(f"optimizer.state.exp_avg.{EMBEDDING}", torch.zeros(11, 8))
    whole = {
        "model": params,
        "optimizer": {"masters": masters, "moment": moment, "step": 3},
        "rng": ShardedObject("rng", b"", (1,), (0,)),
    }
    with pytest.raises(DeclarationError, match=r"(?s)'optimizer.state.exp_avg.*'rng'.*weights_of\(state\)"):
        megackpt.load(whole, tmp_path / "hf", maps="auto")
    weights = weights_of(whole)
    assert weights == {"model": params, "optimizer": {"masters": masters}}
    megackpt.load(weights, tmp_path / "hf", maps="auto", options=LoadOptions(complete=True))
    theirs = tensors["model.layers.0.mlp.up_proj.weight"]
    ours = "decoder.layers.0.mlp.linear_fc1.weight.up"
    assert torch.equal(masters[ours].data, theirs)  # type: ignore[arg-type]
    assert torch.equal(params[ours].data, theirs.bfloat16())  # type: ignore[arg-type]


def test_rows_of_the_vocabulary_that_are_padding_become_0(tmp_path: Path) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    state[EMBEDDING] = torch.full((16, 8), torch.nan)
    _, report = megackpt.load_with_report(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[EMBEDDING], torch.cat([stored[THEIR_EMBEDDING], torch.zeros(5, 8)]))
    (padded,) = report.padded
    assert (padded.key, padded.padded_nbytes) == (EMBEDDING, 5 * 8 * 4)


def test_a_tied_folder_may_hold_the_embedding_twice(tmp_path: Path) -> None:
    stored = write_folder(tmp_path / "hf", TIED, **{THEIR_OUTPUT: torch.zeros(11, 8)})
    state = request(TIED)
    megackpt.load(state, tmp_path / "hf", maps="auto", options=LoadOptions(complete=True))
    assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])


NORM, THEIR_NORM = "decoder.final_layernorm.weight", "model.norm.weight"
FAULTS: dict[str, tuple[Mapping[str, Any], dict[str, Any], dict[str, Any], type[CheckpointError], str]] = {
    # The folder's config, changes of its tensors and of the request, and the error.
    "a missing tensor": (
        CONFIG,
        {THEIR_NORM: None},
        {},
        MissingKeyError,
        rf"lacks 1 of .*'{THEIR_NORM}' \(ours: '{NORM}'\)",
    ),
    "an additional tensor": (
        CONFIG,
        {"model.extra": torch.ones(2)},
        {},
        MissingKeyError,
        r"'model.extra' \(ours: none in the map\)",
    ),
    "a tensor of another shape": (
        CONFIG,
        {THEIR_NORM: torch.ones(9)},
        {},
        MismatchError,
        rf"'{THEIR_NORM}' \(ours: '{NORM}'\): stored as float32 \(9,\), and \(8,\) by the config",
    ),
    "integers": (
        CONFIG,
        {THEIR_NORM: torch.ones(8, dtype=torch.int32)},
        {},
        MismatchError,
        "is stored as int32",
    ),
    "another model": (
        CONFIG,
        {},
        {NORM: torch.ones(9)},
        MismatchError,
        rf"'{NORM}': asked for as \(9,\), and \(8,\) by the config",
    ),
    "fewer rows": (CONFIG, {}, {EMBEDDING: torch.ones(10, 8)}, MismatchError, r"asked for as \(10, 8\)"),
    "an unknown parameter": (
        CONFIG,
        {},
        {"decoder.final_layernorm.bias": torch.ones(8)},
        MapError,
        rf"'decoder.final_layernorm.bias' \(the map has '{NORM}'\)",
    ),
    "an untied model of a tied folder": (
        TIED,
        {},
        {OUTPUT: torch.ones(11, 8)},
        MapError,
        "The config ties the output layer to the embedding",
    ),
    "a tied model of an untied folder": (
        CONFIG,
        {},
        {OUTPUT: None},
        MissingKeyError,
        rf"no rank asks for:\n.*'{THEIR_OUTPUT}' \(ours: '{OUTPUT}'\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_an_error_with_both_names(tmp_path: Path, name: str) -> None:
    config, changes, changed, kind, text = FAULTS[name]
    write_folder(tmp_path / "hf", config, **changes)
    state = {key: value for key, value in (request(config) | changed).items() if value is not None}
    with pytest.raises(kind, match=f"(?s){text}"):
        megackpt.load(state, tmp_path / "hf", maps="auto")


def test_a_part_of_a_model_needs_a_mode_that_tolerates_it(tmp_path: Path) -> None:
    stored = write_folder(tmp_path / "hf")
    state = {NORM: torch.zeros(8)}
    with pytest.raises(MissingKeyError, match="no rank asks for"):
        megackpt.load(state, tmp_path / "hf", maps="auto")
    megackpt.load(state, tmp_path / "hf", maps="auto", strict="ignore_all")
    assert torch.equal(state[NORM], stored[THEIR_NORM])
    kept = request() | {"decoder.own": torch.ones(2)}
    megackpt.load(kept, tmp_path / "hf", maps="auto", options=LoadOptions(exclude=("decoder.own",)))
    assert torch.equal(kept["decoder.own"], torch.ones(2))


@pytest.mark.parametrize(
    ("choice", "config", "text"),
    [
        ("auto", None, "has no config.json, and the map 'auto' depends on"),
        ("lama", CONFIG, "No map is called 'lama'"),
        ("auto", {"model_type": "unheard"}, "No map is for model_type 'unheard'"),
        (3, CONFIG, "map is a int"),
        ("auto", "config.json", "config is a str"),
    ],
)
def test_a_map_that_cannot_be_made_is_an_error(tmp_path: Path, choice: Any, config: Any, text: str) -> None:
    write_folder(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=text):
        megackpt.load(request(), tmp_path / "hf", maps=choice, config=config)


OWN_SIZES = {"e": 2, "h": 4, "i": 6}
OWN_RULES = (
    Rule(ours="norm", theirs="ln", axes="h", added=1),
    Rule(ours="gate", theirs="gate_up", axes="e i h", their_axes="e h [i 0/2]"),
    Rule(ours="up", theirs="gate_up", axes="e i h", their_axes="e h [i 1/2]"),
)


def columns_of(data: Tensor, start: int) -> ShardedTensor:
    """Declare columns of the fused array of 12, from `start` on."""
    return ShardedTensor("gate_up", data, data.dtype, tuple(data.shape), (2, 4, 12), (0, 0, start))


@pytest.mark.parametrize("columns", [(4, 8), (12,), (6, 2, 4)], ids=str)
def test_dims_are_split_and_numbers_added_for_a_family_of_ones_own(
    tmp_path: Path, columns: tuple[int, ...]
) -> None:
    fused, norm = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(2)), torch.arange(4.0)
    starts = [sum(columns[:i]) for i in range(len(columns))]
    chunks = [
        ShardedTensor(
            "gate_up", fused[..., a : a + n].clone(), torch.float32, (2, 4, n), (2, 4, 12), (0, 0, a)
        )
        for a, n in zip(starts, columns, strict=True)
    ]
    megackpt.save({"ln": declared("ln", norm), "chunks": chunks}, tmp_path / "ckpt")
    own = Family("own", ("own",), lambda config, keys: FamilyRules(OWN_RULES, OWN_SIZES))
    state = {"norm": torch.zeros(4), "gate": torch.zeros(2, 6, 4), "up": torch.zeros(2, 6, 4)}
    megackpt.load(state, tmp_path / "ckpt", maps=own, config={})
    assert torch.equal(state["norm"], norm + 1)
    assert torch.equal(state["gate"], fused[..., ::2].transpose(1, 2))
    assert torch.equal(state["up"], fused[..., 1::2].transpose(1, 2))


def test_a_chunk_that_is_cut_inside_of_a_group_is_an_error(tmp_path: Path) -> None:
    chunks = [columns_of(torch.zeros(2, 4, count), start) for start, count in ((0, 5), (5, 7))]
    megackpt.save({"ln": declared("ln", torch.zeros(4)), "chunks": chunks}, tmp_path / "ckpt")
    state = {"norm": torch.zeros(4), "gate": torch.zeros(2, 6, 4), "up": torch.zeros(2, 6, 4)}
    with pytest.raises(MismatchError, match=r"'gate_up' .* cut inside of groups of 2 along dim 2"):
        megackpt.load(state, tmp_path / "ckpt", maps=region_map(OWN_RULES, OWN_SIZES))


def test_a_checkpoint_of_megatron_core_with_padded_rows_is_loaded_by_its_map(tmp_path: Path) -> None:
    family = family_of(CONFIG)
    left = family.region_map(CONFIG).left
    made = megatron_map(left, family.rules(CONFIG, ()).sizes)
    generator = torch.Generator().manual_seed(3)
    stored = {key: torch.randn(array.stored, generator=generator) for key, array in made.right.items()}
    stored[EMBEDDING] = torch.cat([stored[EMBEDDING], torch.ones(5, 8)])  # rows of padding
    megackpt.save({key: declared(key, value) for key, value in stored.items()}, tmp_path / "ckpt")
    state = {key: torch.full(array.stored, torch.nan) for key, array in left.items()}
    megackpt.load(state, tmp_path / "ckpt", maps=made)
    assert torch.equal(state[EMBEDDING], stored[EMBEDDING][:11])
    fused = stored["decoder.layers.self_attention.linear_qkv.weight"][
        1
    ]  # groups of a query, key and value head
    keys = fused.view(2, 3, 4, 8)[:, 1].reshape(8, 8)
    assert torch.equal(state["decoder.layers.1.self_attention.linear_qkv.weight.k"], keys)


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_may_be_stacked_in_the_request(tmp_path: Path, stacked: bool) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    name = "mlp.linear_fc2.weight"
    if stacked:
        parts = [state.pop(f"decoder.layers.{layer}.{name}") for layer in range(2)]
        state[f"decoder.layers.{name}"] = torch.stack(parts)
    megackpt.load(state, tmp_path / "hf", maps="auto")
    second = state[f"decoder.layers.{name}"][1] if stacked else state[f"decoder.layers.1.{name}"]
    assert torch.equal(second, stored["model.layers.1.mlp.down_proj.weight"])


def test_tensors_without_memory_are_filled_in_host_memory(tmp_path: Path) -> None:
    stored = write_folder(tmp_path / "hf")
    state = {key: value.to("meta") for key, value in request(dtype=torch.bfloat16).items()}
    with pytest.raises(DeclarationError, match="meta"):
        megackpt.load(state, tmp_path / "hf", maps="auto")
    loaded = megackpt.load(state, tmp_path / "hf", maps="auto", options=LoadOptions(load_on_device=False))
    assert torch.equal(loaded[NORM], stored[THEIR_NORM].bfloat16())


def test_a_folder_is_loaded_with_a_fallback_to_copies(tmp_path: Path) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    shutil.copytree(tmp_path / "hf", tmp_path / "copy")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"damaged")
    options = LoadOptions(on_corrupt="fallback", copies=(tmp_path / "copy",))
    megackpt.load(state, tmp_path / "hf", maps="auto", options=options)
    assert torch.equal(state[NORM], stored[THEIR_NORM])


def test_tensors_that_share_memory_get_the_values_of_both_keys_or_an_error(tmp_path: Path) -> None:
    equal = torch.ones(8)
    name = "decoder.layers.{}.input_layernorm.weight"
    theirs = {f"model.layers.{layer}.input_layernorm.weight": equal.clone() for layer in range(2)}
    write_folder(tmp_path / "hf", **theirs)
    state = request()
    state[name.format(1)] = state[name.format(0)]
    megackpt.load(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[name.format(0)], equal)
    write_folder(tmp_path / "other")
    with pytest.raises(MismatchError, match="loaded into the same memory"):
        megackpt.load(state, tmp_path / "other", maps="auto")


def test_a_run_begins_with_a_folder_and_then_saves_its_own_steps(tmp_path: Path) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    options = LoadOptions(on_corrupt="fallback", copies=(tmp_path / "copies_of_steps",))
    with Checkpointer(tmp_path / "run", load_options=options) as run:
        assert run.find_latest() is None
        with pytest.raises(MissingKeyError):  # without a map, names of the model are asked for
            run.load_from(dict(state), tmp_path / "hf", strict="raise_unexpected")
        loaded = run.load_from(state, tmp_path / "hf", maps="auto")
        assert loaded.keys() == state.keys()
        assert all(loaded[key] is state[key] for key in state)
        assert run.last_load is None
        assert run.last_report is not None
        assert EMBEDDING in run.last_report.loaded
        assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
        state[EMBEDDING] += 1
        run.save(5, state)
    with Checkpointer(tmp_path / "run") as resumed:
        assert resumed.find_latest() == 5
        again = resumed.load(request())
        assert resumed.last_load is not None
        assert resumed.last_load.step == 5
        assert resumed.last_report is resumed.last_load.report is not None
    assert torch.equal(again[EMBEDDING], stored[THEIR_EMBEDDING] + 1)


@pytest.mark.parametrize("in_tier", [False, True])
def test_a_step_in_another_familys_names_is_loaded_by_a_map(tmp_path: Path, in_tier: bool) -> None:
    stored = write_folder(tmp_path / "hf")
    tiers: list[Any] = [LocalTier(tmp_path / "tier")] if in_tier else []
    with Checkpointer(tmp_path / "run", tiers=tiers) as run:
        run.save(3, stored, to_root=not in_tier)
        state = request()
        run.load(state, maps="llama", config=CONFIG)
        assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
        with pytest.raises(MapError, match="config"):
            run.load(request(), 3, maps="auto")  # a step has no config.json
