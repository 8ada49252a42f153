"""Families of names: their arrays are those of transformers' folders, and each element is moved once.

For any sizes, each element of a family is one element of ours, and of Megatron-Core's.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megackpt.errors import MapError
from megackpt.maps import (
    RegionMap,
    Rule,
    bound_to,
    checkpoint_map,
    family,
    family_of,
    has_megatron_keys,
    megatron_map,
    region_map,
)
from tests.support.effort import few
from tests.support.huggingface_configs import (
    ENCODERS,
    FAMILIES,
    IN_MEGATRON,
    RECURRENT,
    published,
    random_fields,
    untie,
)
from tests.support.states import assembled, random_arrays

SEEDS = range(few(2, of=6))

MODELS = {"bert": "AutoModelForMaskedLM", "mt5": "AutoModelForSeq2SeqLM", "t5": "AutoModelForSeq2SeqLM"}
"""Classes of transformers for families that are no decoders."""


def saved_model(
    model_type: str, seed: int, folder: Path, **options: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Save a random model of transformers; return its config.json and its arrays."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **random_fields(model_type, seed))
    torch.manual_seed(seed)
    model = getattr(transformers, MODELS.get(model_type, "AutoModelForCausalLM")).from_config(config)
    untie(model, random_fields(model_type, seed))
    model.save_pretrained(folder, **options)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def assert_same_arrays(made: RegionMap, theirs: dict[str, Tensor]) -> None:
    assert {k: a.stored for k, a in made.right.items()} == {k: tuple(t.shape) for k, t in theirs.items()}
    ours = assembled(made, theirs)
    assert not any(array.isnan().any() for array in ours.values())
    back = assembled(made.inverse(), ours)
    for key, array in theirs.items():
        assert torch.equal(back[key], array), key


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_arrays_are_those_that_transformers_saves(model_type: str, seed: int, tmp_path: Path) -> None:
    config, theirs = saved_model(model_type, seed, tmp_path)
    assert_same_arrays(family_of(config).region_map(config), theirs)
    assert_same_arrays(family_of(config).region_map(config, list(theirs)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_fused_experts_are_read_as_the_same_arrays_of_ours(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    config, fused = saved_model(model_type, seed, tmp_path / "fused", save_original_format=False)
    made = family_of(config).region_map(config, list(fused))
    assert_same_arrays(made, fused)
    _, modules = saved_model(model_type, seed, tmp_path / "modules")
    ours, same = assembled(made, fused), assembled(family_of(config).region_map(config), modules)
    assert ours.keys() == same.keys()
    assert all(torch.equal(ours[key], same[key]) for key in ours)


# The output layer of Nemotron-H is never tied, so a model without it is not complete.
@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family != "nemotron_h"])
def test_a_folder_of_the_model_without_output_layer_is_read(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fields = random_fields(model_type, 0) | {"tie_word_embeddings": True}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    theirs = load_file(tmp_path / "model.safetensors")
    assert not any(key.startswith(("model.", "transformer.", "backbone.", "bert.")) for key in theirs)
    assert_same_arrays(family_of(config).region_map(config, list(theirs)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_fault_in_the_rules_is_always_found(model_type: str, seed: int) -> None:
    config = {"model_type": model_type, **random_fields(model_type, seed)}
    correct = family_of(config).rules(config, ())
    whole = region_map(correct.rules, correct.sizes)
    chance = random.Random(seed)
    number = chance.randrange(len(correct.rules))
    others = [*correct.rules[:number], *correct.rules[number + 1 :]]
    faulty = [others, [*correct.rules, correct.rules[number]]]
    shifted = [rule for rule in correct.rules if _shifted(rule) is not None]
    if shifted:
        part = chance.choice(shifted)
        faulty.append([rule if rule != part else _shifted(rule) or rule for rule in correct.rules])
    for rules in faulty:
        made = region_map(rules, correct.sizes)
        with pytest.raises(MapError, match="no bijection"):
            RegionMap(whole.left, whole.right, made.pairs).check(name="faulty")


def _shifted(rule: Rule) -> Rule | None:
    """Return a rule whose part of their array begins elsewhere; None if it has all of it."""
    start = rule.their_axes.find("@")
    if start >= 0:
        end = rule.their_axes.index("/", start)
        is_first = rule.their_axes[start:end] == "@0"
        return replace(
            rule, their_axes=f"{rule.their_axes[:start]}@{1 if is_first else 0}{rule.their_axes[end:]}"
        )
    if "0/2]" in rule.their_axes:
        return replace(rule, their_axes=rule.their_axes.replace("0/2]", "1/2]"))
    return None


GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT2, 124_439_808),
        (published(128256, 4096, 32, 32, 8, 14336, model_type="llama"), 8_030_261_248),
        (published(32000, 4096, 32, 32, 8, 14336, model_type="mistral"), 7_241_732_096),
        (published(32064, 3072, 32, 32, 32, 8192, model_type="phi3"), 3_821_079_552),
        (published(152064, 3584, 28, 28, 4, 18944, model_type="qwen2"), 7_615_616_512),
        (published(151936, 4096, 36, 32, 8, 12288, model_type="qwen3"), 8_190_735_360),
        (published(256000, 2304, 26, 8, 4, 9216, model_type="gemma2"), 2_614_341_888),
        (published(32000, 4096, 32, 32, 8, 14336, model_type="mixtral", num_local_experts=8), 46_702_792_704),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_published_models_have_their_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    made = family_of(config).region_map(config)
    for arrays in (made.left, made.right):
        assert sum(math.prod(array.stored) for array in arrays.values()) == parameters


DEFAULTED = (
    "attention_bias",
    "conv_kernel",
    "decoder_sparse_step",
    "feed_forward_proj",
    "head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mlp_bias",
    "mlp_only_layers",
    "n_groups",
    "n_inner",
    "num_decoder_layers",
    "num_key_value_heads",
    "qkv_bias",
    "relative_attention_num_buckets",
    "tie_word_embeddings",
    "type_vocab_size",
    "use_bias",
    "use_conv_bias",
)
"""Entries that decide which arrays there are, and that a config.json may leave out."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_entries_that_are_left_out_have_the_defaults_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {"hidden_size": 4 * 64, "num_attention_heads": 64}
    if model_type in ("gpt2", "mt5", "t5"):
        fields = {}
    elif model_type == "mamba2":
        fields = {"hidden_size": 4 * 64, "num_heads": 8}
    config = transformers.AutoConfig.for_model(model_type, **fields).to_dict()
    config |= {"num_hidden_layers": 2, "n_layer": 2, "layer_types": ["linear_attention", "full_attention"]}
    if "num_experts" in config:  # hundreds, by default
        config["num_experts"] = 4
    complete = family_of(config).region_map(config)
    for name in DEFAULTED:
        left_out = {key: value for key, value in config.items() if key != name}
        assert family_of(config).region_map(left_out).right == complete.right, name


@pytest.mark.parametrize(
    ("model_type", "change", "keys", "text"),
    [
        (
            "gpt_oss",
            {},
            ["model.layers.0.mlp.experts.gate_up_proj_blocks"],
            "quantised .*gate_up_proj_blocks.*dequant",
        ),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, [], "quantised .mxfp4.*config.json"),
        ("qwen3", {}, ["model.layers.0.mlp.up_proj.weight_scale_inv"], "quantised.*weight_scale_inv"),
        ("gpt2", {"add_cross_attention": True}, [], "add_cross_attention is set"),
        ("gpt2", {"n_head": 5}, [], "not a multiple of n_head 5"),
        ("mixtral", {"num_experts": None}, [], "has no num_local_experts or num_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, [], "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, [], "mlp_only_layers is 1. It must be a list"),
        ("llama", {"vocab_size": 10**30}, [], "vocab_size is 1000.*at most 2147483647"),
        ("llama", {"hidden_size": True}, [], "hidden_size is True"),
        ("llama", {"num_hidden_layers": 10**5}, [], "num_hidden_layers is 100000, and at most 10000"),
        ("gpt2", {"n_layer": 10**5}, [], "n_layer is 100000, and at most"),
        ("qwen3", {"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, [], "num_attention_heads is"),
        ("qwen3_moe", {"num_hidden_layers": 10**12}, [], "num_hidden_layers is"),
        ("mixtral", {"num_experts": 10**9}, [], "num_local_experts is 1000000000, and"),
        ("mixtral", {"num_experts": 9999, "num_hidden_layers": 9999}, [], "more than 10000000 pairs"),
    ],
)
def test_a_config_that_no_map_fits_is_an_error(
    model_type: str, change: dict[str, Any], keys: list[str], text: str
) -> None:
    config = {"model_type": model_type, **random_fields(model_type, 0), **change}
    with pytest.raises(MapError, match=text):
        family_of(config).region_map(config, keys)


def test_a_dequantised_folder_is_read_if_its_config_still_has_the_quantisation() -> None:
    config = {"model_type": "gpt_oss", **random_fields("gpt_oss", 0)}
    expected = family("gpt_oss").region_map(config).right
    config["quantization_config"] = {"quant_method": "mxfp4"}
    assert family("gpt_oss").region_map(config, list(expected)).right == expected


EXAMPLES = few(40, of=1000)
SIZE = st.integers(1, 5)
LATENT_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a config of any family, with sizes down to 1 and any of the entries that decide about arrays."""
    model_type = draw(st.sampled_from(FAMILIES))
    if model_type in (*ENCODERS, *RECURRENT):
        return {"model_type": model_type, **random_fields(model_type, draw(st.integers(0, 10**6)))}
    layers, groups, heads_of_group, d = (draw(SIZE) for _ in range(4))
    heads = groups * heads_of_group
    if model_type == "gpt2":
        fields = {"n_layer": layers, "n_head": heads, "n_embd": heads * d, "n_positions": draw(SIZE)}
        fields |= {"n_inner": draw(st.none() | SIZE), "vocab_size": draw(SIZE)}
    else:
        fields = {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": d,
            "hidden_size": draw(SIZE),
            "intermediate_size": draw(SIZE),
            "vocab_size": draw(SIZE),
            "num_experts": draw(SIZE),
            "moe_intermediate_size": draw(SIZE),
            "shared_expert_intermediate_size": draw(SIZE),
            "decoder_sparse_step": draw(st.integers(1, 3)),
            "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1))),
        }
    if model_type == "qwen3_next":
        keys = draw(SIZE)
        fields |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(SIZE)}
        dims = ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
        fields |= {name: draw(SIZE) for name in (*dims, "full_attention_interval")}
    if model_type == "deepseek_v3":
        fields |= {name: draw(SIZE) for name in ("kv_lora_rank", "n_routed_experts", *LATENT_DIMS)}
        fields |= {"q_lora_rank": draw(st.none() | SIZE), "first_k_dense_replace": draw(SIZE)}
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"):
        if draw(st.booleans()):
            fields[name] = draw(st.booleans())
    return {"model_type": model_type, **fields}


@given(config=configs(), is_fused=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_arrays_go_to_every_family_and_back_bit_for_bit(config: dict[str, Any], is_fused: bool) -> None:
    family = family_of(config)
    # Of an encoder, any keys would say whether the output layer is tied.
    is_fused = is_fused and config["model_type"] not in ENCODERS
    keys = ("model.layers.0.mlp.experts.gate_up_proj",) if is_fused else ()
    made = family.region_map(config, keys)  # which proves it
    theirs = random_arrays(made, 0)
    ours = assembled(made, theirs)
    back = assembled(made.inverse(), ours)
    assert all(torch.equal(back[key], array) for key, array in theirs.items())
    assert sum(a.numel() for a in ours.values()) == sum(a.numel() for a in theirs.values())

    if config["model_type"] not in (*IN_MEGATRON, *RECURRENT):
        return
    megatron = megatron_map(made.left, family.rules(config, keys).sizes)
    megatron.check(name="Megatron-Core")
    assert has_megatron_keys(megatron.right)
    stored = assembled(megatron.inverse(), ours)
    back = assembled(megatron, stored)
    assert all(torch.equal(back[key], array) for key, array in ours.items())

    # Through ours, it is the same as through no map of ours at all.
    direct = checkpoint_map(family, config, list(megatron.right))
    written = assembled(direct.inverse(), stored)
    expected = assembled(family.region_map(config).inverse(), ours)
    assert all(torch.equal(written[key], array) for key, array in expected.items())


@given(config=configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_stacked_layers_have_the_same_elements_as_single_ones(config: dict[str, Any]) -> None:
    made = family_of(config).region_map(config)
    theirs = random_arrays(made, 0)
    single = assembled(made, theirs)
    layers = [key.split(".", 3)[2:] for key in made.left if key.startswith("decoder.layers.")]
    numbers = {number for number, _ in layers}
    everywhere = {
        name for _, name in layers if all(f"decoder.layers.{n}.{name}" in made.left for n in numbers)
    }
    bound = bound_to(made, {f"decoder.layers.{name}" for name in everywhere})
    bound.check(name="stacked")
    stacked = assembled(bound, theirs)
    for name in everywhere:
        for layer, array in enumerate(stacked[f"decoder.layers.{name}"]):
            assert torch.equal(array, single[f"decoder.layers.{layer}.{name}"])


def test_names_of_megatron_core_are_those_of_its_hybrid_models() -> None:
    config = {"model_type": "nemotron_h", **random_fields("nemotron_h", 0)} | {
        "hybrid_override_pattern": "ME*-",
        "mlp_bias": False,
    }
    keys = set(_in_megatron(config))
    assert {
        "decoder.final_norm.weight",
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.0.mixer.in_proj.weight.dt",
        "decoder.layers.0.mixer.conv1d.weight.B",
        "decoder.layers.0.mixer.norm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
    } <= keys
    # Layers of mixers have keys of their own, also where all are equal.
    assert "decoder.layers.1.mixer.A_log" in _in_megatron(
        {"model_type": "mamba2", **random_fields("mamba2", 0)}
    )


def _in_megatron(config: dict[str, Any]) -> Sequence[str]:
    made = family_of(config).region_map(config)
    return list(megatron_map(made.left, family_of(config).rules(config, ()).sizes).right)


@pytest.mark.parametrize("kinds", [None, "MXM", 3, ["conv"]])
def test_a_config_without_kinds_of_layers_is_an_error(kinds: Any) -> None:
    config = {"model_type": "nemotron_h", **random_fields("nemotron_h", 0)} | {
        "hybrid_override_pattern": kinds
    }
    with pytest.raises(MapError, match=r"layers_block_type is .*It must have one of M, mamba"):
        family_of(config).region_map(config)
