"""Mixtral, Qwen2-MoE and Qwen3-MoE: experts with modules of their own, or in fused arrays.

Folders have one array for each expert and projection; transformers holds them fused in memory, and some
folders, too. The keys of a folder tell which. What is written has an array for each expert.

Source: transformers 5.23, `MixtralConfig`, `Qwen2MoeConfig`, `Qwen3MoeConfig`, their models, and its
`conversion_mapping`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megackpt.maps.families.decoder import (
    attention_rules,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    outer_rules,
)
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import (
    Config,
    count_of,
    decoder_sizes,
    layers_with_experts,
    size_of,
    with_defaults,
)
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")
"""The block of experts, and of each expert gate, up and down."""


@prefix_is_optional("model.")
def mixtral_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Mixtral, which has experts in all layers and no biases."""
    config = with_defaults(config, keys, num_key_value_heads=8)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *norm_rules(layers), *expert_rules(layers, keys, _MIXTRAL)]
    rules += attention_rules(config, layers, qkv_bias=False, output_bias=False)
    sizes = decoder_sizes(config)
    return FamilyRules(tuple(rules), {**sizes, "e": sizes["i"], "expert": _number_of_experts(config)})


@prefix_is_optional("model.")
def qwen2_moe_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen2-MoE, which has a gated shared expert, and biases of queries, keys, values."""
    config = with_defaults(config, keys, num_key_value_heads=16, qkv_bias=True)
    layers = range(count_of(config, "num_hidden_layers"))
    attention = attention_rules(config, layers, qkv_bias=bool(config["qkv_bias"]), output_bias=False)
    return qwen_rules(config, keys, attention, has_shared_expert=True)


@prefix_is_optional("model.")
def qwen3_moe_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen3-MoE, whose queries and keys pass a norm."""
    config = with_defaults(config, keys, num_key_value_heads=4)
    layers = range(count_of(config, "num_hidden_layers"))
    return qwen_rules(config, keys, attention_rules(config, layers, has_qk_norm=True))


def qwen_rules(
    config: Config, keys: Collection[str], attention: Sequence[Rule], *, has_shared_expert: bool = False
) -> FamilyRules:
    """Return the rules of a Qwen model with experts in some or all layers.

    Args:
        config: its config.
        keys: of the folder; none for one to be written.
        attention: the rules of what mixes the tokens.
        has_shared_expert: whether layers with experts have a gated shared one, too.
    """
    layers, sparse = range(count_of(config, "num_hidden_layers")), layers_with_experts(config)
    dense = [layer for layer in layers if layer not in sparse]
    rules = [*outer_rules(config), *norm_rules(layers), *attention]
    sizes = decoder_sizes(config)
    if dense:
        rules += gated_mlp_rules(dense)
    if sparse:
        rules += expert_rules(sparse, keys, QWEN)
        sizes |= {"e": size_of(config, "moe_intermediate_size"), "expert": _number_of_experts(config)}
    if sparse and has_shared_expert:
        rules += shared_expert_rules(sparse)
        sizes["s"] = size_of(config, "shared_expert_intermediate_size")
    return FamilyRules(tuple(rules), sizes)


def expert_rules(
    layers: Sequence[int], keys: Collection[str], names: tuple[str, str, str, str]
) -> list[Rule]:
    """Return the rules of router and experts.

    Args:
        layers: those with experts.
        keys: of the folder; none for one to be written.
        names: of the block where each expert is a module, and of its gate, up and down.
    """
    if any(key.endswith(".mlp.experts.gate_up_proj") for key in keys):
        return _fused_expert_rules(layers)
    block, gate, up, down = names
    module = f"{block}.experts.{{expert}}"
    return [
        layer_rule("mlp.router.weight", f"{block}.gate.weight", "expert h", layers),
        layer_rule(f"{_FC1}.gate", f"{module}.{gate}.weight", "expert e h", layers),
        layer_rule(f"{_FC1}.up", f"{module}.{up}.weight", "expert e h", layers),
        layer_rule(_FC2, f"{module}.{down}.weight", "expert h e", layers),
    ]


_FC1, _FC2 = "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"


def _fused_expert_rules(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of a folder that has the gate and up of all experts in one array."""
    fused = "mlp.experts.gate_up_proj"
    return [
        layer_rule("mlp.router.weight", "mlp.gate.weight", "expert h", layers),
        layer_rule(f"{_FC1}.gate", fused, "expert e h", layers, "expert e@0/2e h"),
        layer_rule(f"{_FC1}.up", fused, "expert e h", layers, "expert e@e/2e h"),
        layer_rule(_FC2, "mlp.experts.down_proj", "expert h e", layers),
    ]


def shared_expert_rules(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of a shared expert whose output is gated; its ffn is the axis `s`."""
    ours, theirs = "mlp.shared_experts", "mlp.shared_expert"
    return [
        layer_rule(f"{ours}.linear_fc1.weight.gate", f"{theirs}.gate_proj.weight", "s h", layers),
        layer_rule(f"{ours}.linear_fc1.weight.up", f"{theirs}.up_proj.weight", "s h", layers),
        layer_rule(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", "h s", layers),
        layer_rule(f"{ours}.gate_weight", "mlp.shared_expert_gate.weight", "0/1 h", layers),
    ]


def _number_of_experts(config: Config) -> int:
    return count_of(config, "num_local_experts", "num_experts")


MIXTRAL = Family("mixtral", ("mixtral",), mixtral_rules)
QWEN2_MOE = Family("qwen2_moe", ("qwen2_moe",), qwen2_moe_rules)
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), qwen3_moe_rules)
