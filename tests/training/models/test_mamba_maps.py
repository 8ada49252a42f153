"""Maps of Mamba-2 and Nemotron-H: every element is moved once, to folders and to Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megackpt import MapError
from megackpt.maps import Rule, checkpoint_map, family_of, has_megatron_keys, megatron_map, region_map
from tests.support.huggingface_recurrent import FAMILIES, random_fields
from tests.support.states import assembled, random_arrays

SEEDS = range(5)


def config_of(family: str, seed: int) -> dict[str, Any]:
    return {"model_type": family, **random_fields(family, seed)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_arrays_go_to_folders_and_to_megatron_core_and_back_bit_for_bit(seed: int, family: str) -> None:
    config = config_of(family, seed)
    made = family_of(config).region_map(config)  # which proves it
    theirs = random_arrays(made, seed)
    ours = assembled(made, theirs)
    back = assembled(made.inverse(), ours)
    assert all(torch.equal(back[key], array) for key, array in theirs.items())

    megatron = megatron_map(made.left, family_of(config).rules(config, ()).sizes)
    assert has_megatron_keys(megatron.right)
    stored = assembled(megatron.inverse(), ours)
    direct = checkpoint_map(family_of(config), config, list(megatron.right))
    assert all(torch.equal(a, theirs[key]) for key, a in assembled(direct.inverse(), stored).items())


def test_names_of_megatron_core_are_those_of_its_hybrid_models() -> None:
    config = config_of("nemotron_h", 0) | {"hybrid_override_pattern": "ME*-", "mlp_bias": False}
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
    assert "decoder.layers.1.mixer.A_log" in _in_megatron(config_of("mamba2", 0))


def _in_megatron(config: dict[str, Any]) -> Sequence[str]:
    made = family_of(config).region_map(config)
    return list(megatron_map(made.left, family_of(config).rules(config, ()).sizes).right)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_that_begins_elsewhere_is_found(family: str) -> None:
    config = config_of(family, 0)
    rules = family_of(config).rules(config, ())
    faulty = [
        Rule(**{name: getattr(rule, name) for name in Rule.__slots__} | {"their_axes": _swapped(rule)})
        for rule in rules.rules
    ]
    with pytest.raises(MapError, match="no bijection"):
        region_map(faulty, rules.sizes).check(name="faulty")


def _swapped(rule: Rule) -> str:
    """Return the axes of a rule, C where B is."""
    return rule.their_axes.replace("state@2inner+state/", "state@2inner/")


@pytest.mark.parametrize("kinds", [None, "MXM", 3, ["conv"]])
def test_a_config_without_kinds_of_layers_is_an_error(kinds: Any) -> None:
    config = config_of("nemotron_h", 0) | {"hybrid_override_pattern": kinds}
    with pytest.raises(MapError, match=r"layers_block_type is .*It must have one of M, mamba"):
        family_of(config).region_map(config)
