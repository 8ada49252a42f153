"""Maps of Megatron-Core's keys: every spelling has the same elements, and each is moved once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.errors import MapError
from megackpt.maps import (
    RegionMap,
    bound_to,
    checkpoint_map,
    family,
    family_of,
    has_megatron_keys,
    megatron_map,
)
from tests.support.effort import few
from tests.support.huggingface_configs import IN_MEGATRON, random_fields
from tests.support.states import assembled, random_arrays

SEEDS = range(few(2, of=5))


def config_of(model_type: str, seed: int) -> dict[str, Any]:
    config = {"model_type": model_type, **random_fields(model_type, seed)}
    # The rows of latent attention are in Megatron-Core's order only if they are interleaved.
    return config | {"rope_interleave": True} if model_type == "deepseek_v3" else config


def map_of(config: dict[str, Any], keys: tuple[str, ...] = (), prefix: str = "") -> RegionMap:
    family = family_of(config)
    made = family.region_map(config)
    return megatron_map(made.left, family.rules(config, ()).sizes, keys, prefix=prefix)


def per_layer(keys: list[str], config: dict[str, Any]) -> tuple[str, ...]:
    """Return keys with layers instead of stacked ones."""
    count = config.get("num_hidden_layers") or config.get("n_layer") or config["num_layers"]
    counts = {"encoder": count, "decoder": config.get("num_decoder_layers", count)}
    return tuple(
        re.sub(r"layers\.(?!\d)", f"layers.{layer}.", key)
        for key in keys
        for layer in range(counts[key.partition(".")[0]] if "layers." in key else 1)
    )


def singletons(keys: tuple[str, ...], config: dict[str, Any]) -> tuple[str, ...]:
    """Return keys for each expert, and each of gate and up, as `singleton_local_shards` has them."""
    spelled: list[str] = []
    for key in keys:
        halves = (key + "_w", key + "_v") if re.search(r"linear_fc1\.(weight|bias)$", key) else (key,)
        count = config.get("num_experts", config.get("n_routed_experts", 0))
        experts = range(count) if "experts.experts." in key else [None]
        for half in halves:
            spelled += [
                half if e is None else half.replace("experts.experts.", f"experts.experts.{e}.")
                for e in experts
            ]
    return tuple(spelled)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", IN_MEGATRON)
def test_every_spelling_is_picked_by_the_keys_and_holds_the_same_elements(model_type: str, seed: int) -> None:
    config = config_of(model_type, seed)
    hub = family_of(config).region_map(config)
    theirs = random_arrays(hub, seed)
    ours = assembled(hub, theirs)
    written = map_of(config)
    assert has_megatron_keys(written.right)
    spellings = [tuple(written.right), per_layer(list(written.right), config)]
    if model_type not in ("gpt2", "mt5"):  # singletons are those of gated MLPs
        spellings.append(singletons(spellings[1], config))
    for keys in spellings:
        for prefix in ("", "model."):
            named = tuple(prefix + key for key in keys)
            made = checkpoint_map(family_of(config), config, named, prefix=prefix)
            assert set(made.left) == set(named)
            stored = assembled(made, theirs)
            assert_equal(assembled(made.inverse(), stored), theirs)
            assert_equal(assembled(map_of(config, named, prefix), stored), ours)


def assert_equal(arrays: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert torch.equal(arrays[key], array), key


def test_queries_keys_and_values_are_joined_by_query_group() -> None:
    config = config_of("qwen3", 0) | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    hub = family_of(config).region_map(config)
    ours = assembled(hub, random_arrays(hub, 0))
    stored = assembled(map_of(config).inverse(), ours)["decoder.layers.self_attention.linear_qkv.weight"]
    q, k, v = (ours[f"decoder.layers.0.self_attention.linear_qkv.weight.{part}"] for part in "qkv")
    expected = torch.cat([q[:12], k[:4], v[:4], q[12:], k[4:], v[4:]])
    assert torch.equal(stored[0], expected)


def test_output_gates_follow_the_queries_of_their_group() -> None:
    config = config_of("qwen3_next", 0) | {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    hub = family_of(config).region_map(config)
    ours = assembled(hub, random_arrays(hub, 0))
    (key,) = (key for key in map_of(config).right if key.endswith("self_attention.linear_qkv.weight"))
    stored = assembled(map_of(config).inverse(), ours)[key]
    q, gate, k, v = (
        ours[f"decoder.layers.0.self_attention.linear_qkv.weight.{part}"] for part in ("q", "gate", "k", "v")
    )
    expected = torch.cat([q[:12], gate[:12], k[:4], v[:4], q[12:], gate[12:], k[4:], v[4:]])
    assert torch.equal(stored[0] if stored.ndim == 3 else stored, expected)


def test_gated_delta_nets_have_the_norm_before_them_and_zero_centred_ones_inside() -> None:
    config = config_of("qwen3_next", 0) | {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    made = map_of(config)
    assert "decoder.layers.0.self_attention.in_proj.layer_norm_weight" in made.right
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in made.right
    added = {pair.left.key for pair in made.pairs if pair.added}
    assert added == {"decoder.layers.0.self_attention.out_norm.weight"}
    with pytest.raises(MapError, match=r"zero-centred in both\. Leave it at 0"):
        checkpoint_map(family_of(config), config, list(made.right), norm_added=1)


def test_keys_and_values_of_cross_attention_are_joined_by_head() -> None:
    config = config_of("mt5", 0) | {"num_heads": 2, "d_kv": 3}
    hub = family_of(config).region_map(config)
    ours = assembled(hub, random_arrays(hub, 0))
    stored = assembled(map_of(config).inverse(), ours)
    k, v = (ours[f"decoder.layers.0.cross_attention.linear_kv.weight.{part}"] for part in "kv")
    joined = stored["decoder.layers.cross_attention.linear_kv.weight"][0]
    assert torch.equal(joined, torch.cat([k[:3], v[:3], k[3:], v[3:]]))
    assert "encoder_relative_pos_emb.relative_attention_bias.weight" in stored
    assert "lm_head.output_layer.weight" in stored


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("bert", "norms before its blocks, and this one after"),
        ("t5", "has a bias in an output layer that is tied"),
    ],
)
def test_models_that_megatron_core_has_otherwise_are_an_error(model_type: str, text: str) -> None:
    config = config_of(model_type, 0)
    with pytest.raises(MapError, match=text):
        map_of(config)


def test_gate_and_up_follow_each_other_in_each_expert() -> None:
    config = config_of("mixtral", 1)
    hub = family_of(config).region_map(config)
    ours = assembled(hub, random_arrays(hub, 0))
    stored = assembled(map_of(config).inverse(), ours)["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    gate, up = (ours[f"decoder.layers.0.mlp.experts.linear_fc1.weight.{part}"] for part in ("gate", "up"))
    assert torch.equal(stored[0], torch.cat([gate, up], dim=1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_layers_for_further_tokens_are_named_as_those_of_the_model(model_type: str, seed: int) -> None:
    config = config_of(model_type, seed) | {"num_nextn_predict_layers": 2}
    chosen = family(f"{model_type}_mtp")
    hub, sizes = chosen.region_map(config), chosen.rules(config, ()).sizes
    theirs = random_arrays(hub, seed)
    written = megatron_map(hub.left, sizes)
    inner = "mtp.layers.0.transformer_layer"
    norm = "input_layernorm." if model_type == "deepseek_v3" else "self_attention.linear_qkv.layer_norm_"
    assert {f"{inner}.{norm}weight", f"{inner}.self_attention.linear_proj.weight"} < written.right.keys()
    assert {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")} < (
        written.right.keys()
    )
    stored = assembled(checkpoint_map(chosen, config, list(written.right)), theirs)
    assert_equal(assembled(written, stored), assembled(hub, theirs))
    with pytest.raises(MapError, match=r"(?s)has not: .*mtp\.layers\.0.*such as deepseek_v3_mtp"):
        checkpoint_map(family_of(config), config, list(written.right))


def test_latent_attention_whose_rows_are_not_interleaved_is_an_error() -> None:
    config = config_of("deepseek_v3", 0) | {"rope_interleave": False}
    with pytest.raises(MapError, match="rotates pairs of neighbouring rows"):
        checkpoint_map(family_of(config), config, list(map_of(config).right))


def test_zero_centred_norms_are_added_to_and_nothing_else_is() -> None:
    config = config_of("qwen3", 0)
    family = family_of(config)
    written = map_of(config)
    made = checkpoint_map(family, config, list(written.right), norm_added=1)
    stored = random_arrays(written, 0)
    for key, array in assembled(made.inverse(), stored).items():
        plain = assembled(checkpoint_map(family, config, list(written.right)).inverse(), stored)[key]
        assert torch.equal(array, plain + 1 if "norm" in key else plain), key


def test_layers_with_and_without_experts_have_keys_of_their_own() -> None:
    config = config_of("qwen3_moe", 0) | {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    }
    keys = set(map_of(config).right)
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in keys
    assert "decoder.layers.1.mlp.experts.experts.linear_fc2.weight" in keys
    assert not any(key.startswith("decoder.layers.mlp") for key in keys)


def test_local_layers_with_experts_may_store_their_norm_as_dense_ones_do() -> None:
    config = config_of("mixtral", 0)
    keys = tuple(
        key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_") for key in map_of(config).right
    )
    assert set(map_of(config, keys).right) == set(keys)


def test_a_checkpoint_of_ours_is_mapped_by_its_own_keys() -> None:
    config = config_of("llama", 0)
    hub = family_of(config).region_map(config)
    keys = {re.sub(r"layers\.\d+\.", "layers.", key) for key in hub.left}
    made = checkpoint_map(family_of(config), config, keys)
    assert set(made.left) == keys
    assert made.pairs == bound_to(hub, keys).pairs


@pytest.mark.parametrize(
    ("lacking", "added", "text"),
    [
        ("decoder.layers.self_attention.linear_proj.weight", "", r"linear_proj\.weight.*has no array"),
        ("embedding.word_embeddings.weight", "", r"has no array.*prefix"),
        ("", "decoder.layers.mlp.router.expert_bias", r"has not:.*expert_bias.*Give the config"),
        ("", "output_layer.bias", r"has not:.*output_layer\.bias"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_config_is_an_error(lacking: str, added: str, text: str) -> None:
    config = config_of("llama", 0)
    keys = (
        {*map_of(config).right, "optimizer.state.exp_avg.x", "decoder.layers.mlp._extra_state"} | {added}
    ) - {lacking, ""}
    with pytest.raises(MapError, match=f"(?s){text}"):
        checkpoint_map(family_of(config), config, keys)


def test_heads_that_do_not_fit_the_arrays_are_an_error() -> None:
    config = config_of("llama", 0)
    family = family_of(config)
    sizes = {**family.rules(config, ()).sizes, "groups": 7}
    with pytest.raises(MapError, match="7 query groups with"):
        megatron_map(family.region_map(config).left, sizes)
