"""Maps between families of names: rules, their proof, inverses and joins; loads and steps through them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt import (
    Checkpointer,
    CheckpointError,
    DeclarationError,
    KeyRule,
    LoadOptions,
    MismatchError,
    MissingKeyError,
    Policy,
    ShardedObject,
    ShardedTensor,
)
from megackpt.errors import MapError
from megackpt.maps import Family, FamilyRules, Rule, family_of, region_map, weights_of
from megackpt.maps.megatron import megatron_map
from megackpt.maps.regions import Region, RegionMap, RegionPair
from megackpt.maps.requests import MASTER, mapped_tensors
from megackpt.plans.geometry import Box
from megackpt.run.checkpointer import LocalTier
from tests.support.huggingface_folders import write_random_folder
from tests.support.states import assembled, random_arrays, sharded

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


def request(config: Mapping[str, Any] = CONFIG, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return NaNs for each of our arrays, one for each layer."""
    left = family_of(config).region_map(config).left
    return {key: torch.full(array.stored, torch.nan, dtype=dtype) for key, array in left.items()}


def declared(key: str, data: Tensor) -> ShardedTensor:
    shape = tuple(data.shape)
    return ShardedTensor(key, data, data.dtype, shape, shape, (0,) * len(shape))


def test_plain_tensors_under_our_names_are_filled_and_returned(tmp_path: Path) -> None:
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
    loaded = megackpt.load(state, tmp_path / "hf", maps="auto")
    assert loaded.keys() == state.keys()
    assert all(loaded[key] is state[key] for key in state)
    assert not any(value.isnan().any() for value in state.values())
    assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
    ours = state["decoder.layers.1.self_attention.linear_qkv.weight.k"]
    assert torch.equal(ours, stored["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("choice", ["llama", family_of(CONFIG), family_of(CONFIG).region_map(CONFIG)])
def test_a_map_is_chosen_by_name_or_given(tmp_path: Path, choice: Any) -> None:
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
    (tmp_path / "hf" / "config.json").unlink()
    megackpt.load(state, tmp_path / "hf", maps=choice, config=CONFIG)
    assert torch.equal(state[OUTPUT], stored[THEIR_OUTPUT])


@pytest.mark.parametrize(
    ("stored", "asked"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_floats_are_cast_to_the_nearest_and_the_report_names_them(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype
) -> None:
    tensors, state = write_random_folder(tmp_path / "hf", CONFIG, dtype=stored), request(dtype=asked)
    _, report = megackpt.load_with_report(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[EMBEDDING], tensors[THEIR_EMBEDDING].to(asked))
    assert {array.key for array in report.cast} == set(state)
    assert str(stored).removeprefix("torch.") in str(report)
    strict = LoadOptions(rules=(KeyRule(keys=EMBEDDING, cast=Policy.ERROR),))
    with pytest.raises(MismatchError, match=f"'{EMBEDDING}': '{THEIR_EMBEDDING}' is stored as"):
        megackpt.load(state, tmp_path / "hf", maps="auto", options=strict)


def test_a_parameter_and_its_master_are_filled_from_one_array(tmp_path: Path) -> None:
    tensors = write_random_folder(tmp_path / "hf", CONFIG)
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
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
    state[EMBEDDING] = torch.full((16, 8), torch.nan)
    _, report = megackpt.load_with_report(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[EMBEDDING], torch.cat([stored[THEIR_EMBEDDING], torch.zeros(5, 8)]))
    (padded,) = report.padded
    assert (padded.key, padded.padded_nbytes) == (EMBEDDING, 5 * 8 * 4)


def test_a_tied_folder_may_hold_the_embedding_twice(tmp_path: Path) -> None:
    embedding = write_random_folder(tmp_path / "alone", TIED)[THEIR_EMBEDDING]
    stored = write_random_folder(tmp_path / "hf", TIED, **{THEIR_OUTPUT: embedding.clone()})
    state = request(TIED)
    megackpt.load(state, tmp_path / "hf", maps="auto", options=LoadOptions(complete=True))
    assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_all", "log_all"])
def test_a_tied_folder_with_another_output_layer_is_an_error_unless_a_rule_leaves_it(
    strict: Any, tmp_path: Path
) -> None:
    write_random_folder(tmp_path / "hf", TIED, **{THEIR_OUTPUT: torch.full((11, 8), torch.nan)})
    if strict != "log_all":
        with pytest.raises(MismatchError, match=r"'lm_head.weight' has other bytes than .* Untie both"):
            megackpt.load(request(TIED), tmp_path / "hf", maps="auto", strict=strict)
    rules = LoadOptions(rules=(KeyRule(keys=THEIR_OUTPUT, missing=Policy.IGNORE),))
    state = request(TIED)
    megackpt.load(state, tmp_path / "hf", maps="auto", strict=strict, options=rules)


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
    write_random_folder(tmp_path / "hf", config, **changes)
    state = {key: value for key, value in (request(config) | changed).items() if value is not None}
    with pytest.raises(kind, match=f"(?s){text}"):
        megackpt.load(state, tmp_path / "hf", maps="auto")


def test_a_part_of_a_model_needs_a_mode_that_tolerates_it(tmp_path: Path) -> None:
    stored = write_random_folder(tmp_path / "hf", CONFIG)
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
    write_random_folder(tmp_path / "hf", CONFIG)
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
    chunks = [columns_of(fused[..., a : a + n].clone(), a) for a, n in zip(starts, columns, strict=True)]
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
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
    name = "mlp.linear_fc2.weight"
    if stacked:
        parts = [state.pop(f"decoder.layers.{layer}.{name}") for layer in range(2)]
        state[f"decoder.layers.{name}"] = torch.stack(parts)
    megackpt.load(state, tmp_path / "hf", maps="auto")
    second = state[f"decoder.layers.{name}"][1] if stacked else state[f"decoder.layers.1.{name}"]
    assert torch.equal(second, stored["model.layers.1.mlp.down_proj.weight"])


def test_tensors_without_memory_are_filled_in_host_memory(tmp_path: Path) -> None:
    stored = write_random_folder(tmp_path / "hf", CONFIG)
    state = {key: value.to("meta") for key, value in request(dtype=torch.bfloat16).items()}
    with pytest.raises(DeclarationError, match="meta"):
        megackpt.load(state, tmp_path / "hf", maps="auto")
    loaded = megackpt.load(state, tmp_path / "hf", maps="auto", options=LoadOptions(load_on_device=False))
    assert torch.equal(loaded[NORM], stored[THEIR_NORM].bfloat16())


def test_a_folder_is_loaded_with_a_fallback_to_copies(tmp_path: Path) -> None:
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
    shutil.copytree(tmp_path / "hf", tmp_path / "copy")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"damaged")
    options = LoadOptions(on_corrupt="fallback", copies=(tmp_path / "copy",))
    megackpt.load(state, tmp_path / "hf", maps="auto", options=options)
    assert torch.equal(state[NORM], stored[THEIR_NORM])


def test_tensors_that_share_memory_get_the_values_of_both_keys_or_an_error(tmp_path: Path) -> None:
    equal = torch.ones(8)
    name = "decoder.layers.{}.input_layernorm.weight"
    theirs = {f"model.layers.{layer}.input_layernorm.weight": equal.clone() for layer in range(2)}
    write_random_folder(tmp_path / "hf", CONFIG, **theirs)
    state = request()
    state[name.format(1)] = state[name.format(0)]
    megackpt.load(state, tmp_path / "hf", maps="auto")
    assert torch.equal(state[name.format(0)], equal)
    write_random_folder(tmp_path / "other", CONFIG)
    with pytest.raises(MismatchError, match="loaded into the same memory"):
        megackpt.load(state, tmp_path / "other", maps="auto")


def test_a_run_begins_with_a_folder_and_then_saves_its_own_steps(tmp_path: Path) -> None:
    stored, state = write_random_folder(tmp_path / "hf", CONFIG), request()
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
    stored = write_random_folder(tmp_path / "hf", CONFIG)
    tiers: list[Any] = [LocalTier(tmp_path / "tier")] if in_tier else []
    with Checkpointer(tmp_path / "run", tiers=tiers) as run:
        run.save(3, stored, to_root=not in_tier)
        state = request()
        run.load(state, maps="llama", config=CONFIG)
        assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
        with pytest.raises(MapError, match="config"):
            run.load(request(), 3, maps="auto")  # a step has no config.json


SIZES = {"q": 8, "h": 4, "i": 6, "expert": 3, "groups": 2, "r": 4, "d": 2, "v": 7}
CONV1D = [
    Rule(ours=f"attention.{part}", theirs="c_attn", axes="q h", their_axes=f"h ({number}/3 q)")
    for number, part in enumerate("qkv")
]
FUSED_EXPERTS = [
    Rule(ours=f"experts.{part}", theirs="gate_up", axes="expert i h", their_axes=f"expert h [i {number}/2]")
    for number, part in enumerate(("gate", "up"))
]
MODULES = [Rule(ours="down", theirs="experts.{expert}.down", axes="expert h i")]
INTERLEAVED = [
    Rule(ours="qkv.q", theirs="qkv", axes="(groups r) h", their_axes="(groups r@0/r+2d) h"),
    Rule(ours="qkv.k", theirs="qkv", axes="(groups d) h", their_axes="(groups d@r/r+2d) h"),
    Rule(ours="qkv.v", theirs="qkv", axes="(groups d) h", their_axes="(groups d@r+d/r+2d) h"),
]
ZERO_CENTRED = [Rule(ours="norm", theirs="norm", axes="h", added=1)]
RULES = [*CONV1D, *FUSED_EXPERTS, *MODULES, *INTERLEAVED, *ZERO_CENTRED]


def test_each_operation_takes_the_elements_that_its_axes_name() -> None:
    made = region_map(RULES, SIZES)
    made.check(name="all operations")
    theirs = random_arrays(made, 1)
    ours = assembled(made, theirs)
    assert torch.equal(ours["attention.k"], theirs["c_attn"].T[8:16])
    assert torch.equal(ours["experts.up"], theirs["gate_up"][..., 1::2].transpose(1, 2))
    assert torch.equal(ours["down"][2], theirs["experts.2.down"])
    assert torch.equal(ours["norm"], theirs["norm"] + 1)
    grouped = theirs["qkv"].view(2, 8, 4)
    assert torch.equal(ours["qkv.q"], grouped[:, :4].reshape(8, 4))
    assert torch.equal(ours["qkv.v"], grouped[:, 6:].reshape(4, 4))


def test_a_map_and_its_inverse_give_the_same_bits() -> None:
    made = region_map(RULES, SIZES)
    theirs = random_arrays(made, 2)
    back = assembled(made.inverse(), assembled(made, theirs))
    for key, array in theirs.items():
        assert torch.equal(back[key].view(array.shape), array), key


def test_maps_are_joined_through_the_common_family() -> None:
    other = region_map([r for r in RULES if r.ours.startswith("qkv")], SIZES)
    split = region_map(
        [
            Rule(ours=f"qkv.{p}", theirs=f"{p}_proj", axes=a)
            for p, a in zip("qkv", ("q h", "r h", "r h"), strict=True)
        ],
        SIZES,
    )
    joined = other.inverse().joined(split)
    joined.check(name="joined")
    theirs = random_arrays(joined, 3)
    (fused,) = assembled(joined, theirs).values()
    assert torch.equal(
        fused.view(2, 8, 4)[1], torch.cat([theirs["q_proj"][4:], theirs["k_proj"][2:], theirs["v_proj"][2:]])
    )


@pytest.mark.parametrize("seed", range(5))
def test_requests_of_boxes_and_flat_ranges_name_the_same_elements(seed: int) -> None:
    chance = random.Random(seed)
    made = region_map(RULES, SIZES)
    theirs = random_arrays(made, seed)
    ours = assembled(made, theirs)
    for key, array in ours.items():
        shape = array.shape
        start = [chance.randrange(n) for n in shape]
        extent = [chance.randint(1, n - a) for n, a in zip(shape, start, strict=True)]
        box = Box(tuple(start), tuple(extent))
        wanted = array[box.slices()]
        low = chance.randrange(wanted.numel())
        high = chance.randint(low, wanted.numel())
        for flat in (None, slice(low, high)):
            data = torch.zeros(extent) if flat is None else torch.zeros(high - low)
            tensor = ShardedTensor(
                key, data, data.dtype, box.shape, tuple(shape), box.start, flattened_range=flat
            )
            for part in mapped_tensors(tensor, key, made):
                region, into = part.theirs, part.theirs.data
                source = theirs[region.key].view(region.global_shape)
                assert into is not None
                into.copy_(source[Box(region.global_offset, region.local_shape).slices()] + part.added)
            assert torch.equal(data, wanted if flat is None else wanted.flatten()[flat]), key


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (RULES[1:], r"'c_attn' \(4, 24\) \[0:4, 0:8\] is in no pair"),
        ([*RULES, MODULES[0]], r"'down' .* is in more than one pair"),
        ([Rule(ours="a", theirs="b", axes="q h", their_axes="q i")], r"axes \['h', 'q'\] of ours are not"),
        ([Rule(ours="a", theirs="b", axes="unknown")], "'unknown' has no size"),
        ([*CONV1D, Rule(ours="x", theirs="c_attn", axes="q")], "'c_attn' has the shape"),
    ],
    ids=["a hole", "twice", "other axes", "no size", "two shapes"],
)
def test_rules_that_are_no_bijection_are_an_error(rules: list[Rule], text: str) -> None:
    with pytest.raises(MapError, match=text):
        region_map(rules, SIZES).check(name="faulty")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"model_type": "unheard"}, "No map is for model_type 'unheard'"),
    ],
)
def test_a_config_that_makes_no_sense_is_an_error(change: dict[str, object], text: str) -> None:
    config = CONFIG | change
    with pytest.raises(MapError, match=text):
        family_of(config).region_map(config)


def _with_pair(made: RegionMap, number: int, pair: RegionPair | None) -> RegionMap:
    """Return a map with another pair of a number, or without it."""
    pairs = [*made.pairs[:number], *([] if pair is None else [pair]), *made.pairs[number + 1 :]]
    return RegionMap(made.left, made.right, tuple(pairs))


def _wrong_maps(made: RegionMap) -> dict[str, RegionMap]:
    """Return maps with one fault each; the first pair is of the embedding, a matrix that is not square."""
    first, second = made.pairs[0], made.pairs[1]
    box = first.left.box
    outside = Region(first.left.key, Box((box.start[0] + 1, *box.start[1:]), box.shape))
    short = Region(first.left.key, Box(box.start, (box.shape[0] - 1, *box.shape[1:])))
    array = made.left[first.left.key]
    other_view = {**made.left, first.left.key: array._replace(stored=(*array.stored[:-1], 1))}
    return {
        "a hole": _with_pair(made, 0, None),
        "twice": RegionMap(made.left, made.right, (*made.pairs, first)),
        "other axes": _with_pair(made, 0, replace(first, axes=first.axes[::-1])),
        "an axis twice": _with_pair(made, 0, replace(first, axes=(0,) * len(first.axes))),
        "too few axes": _with_pair(made, 0, replace(first, axes=first.axes[1:])),
        "an axis too many": _with_pair(made, 0, replace(first, axes=(*first.axes[:-1], 9))),
        "outside": _with_pair(made, 0, replace(first, left=outside)),
        "short on one side": _with_pair(made, 0, replace(first, left=short)),
        "no such array": _with_pair(made, 0, replace(first, right=first.right._replace(key="none"))),
        "exchanged": _with_pair(made, 0, replace(first, right=second.right)),
        "another size": RegionMap(other_view, made.right, made.pairs),
    }


FAULTS_OF_MAPS = list(_wrong_maps(family_of(CONFIG).region_map(CONFIG)))


@pytest.mark.parametrize("fault", FAULTS_OF_MAPS)
def test_a_map_of_a_user_is_proved_before_a_byte_moves(tmp_path: Path, fault: str) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    made = family_of(CONFIG).region_map(CONFIG)
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "c", map=made)
    wrong = _wrong_maps(made)[fault]
    before = torch.full((11, 8), 7.0)
    state = {EMBEDDING: sharded(EMBEDDING, before.clone())}
    acts: list[Callable[[], Any]] = [
        lambda: megackpt.load(state, tmp_path / "hf", maps=wrong, strict="ignore_all"),
        lambda: megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new", map=wrong),
        lambda: megackpt.export_huggingface(tmp_path / "c", tmp_path / "new", map=wrong),
    ]
    for act in acts:
        with pytest.raises(MapError, match=r"The map that is given is (wrong|no bijection)"):
            act()
    assert torch.equal(state[EMBEDDING].data, before)
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_two_arrays_of_a_map_cannot_get_one_key() -> None:
    made = family_of(CONFIG).region_map(CONFIG)
    with pytest.raises(MapError, match=f"would have the key '{OUTPUT}'"):
        made.with_left_keys({EMBEDDING: OUTPUT})
