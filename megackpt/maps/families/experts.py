"""Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3: decoders with experts, one by one or fused.

Folders have one array for each expert and projection; transformers holds them fused in memory, and some
folders, too. The keys of a folder tell which. What is written has an array for each expert.

Source: transformers 5.23, `MixtralConfig`, `Qwen2MoeConfig`, `Qwen3MoeConfig`, their models, and its
`conversion_mapping`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.decoder import (
    THEIRS,
    attention_rules,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    outer_rules,
    prefix_is_optional,
    rules_elsewhere,
)
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
EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
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
        rules += expert_rules(sparse, keys, EXPERT_NAMES)
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
    ours = "mlp.shared_experts"
    return [
        *gated_mlp_rules(layers, ours, "mlp.shared_expert", axis="s"),
        layer_rule(f"{ours}.gate_weight", "mlp.shared_expert_gate.weight", "0/1 h", layers),
    ]


def _number_of_experts(config: Config) -> int:
    return count_of(config, "num_local_experts", "num_experts")


MIXTRAL = Family("mixtral", ("mixtral",), mixtral_rules)
QWEN2_MOE = Family("qwen2_moe", ("qwen2_moe",), qwen2_moe_rules)
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), qwen3_moe_rules)


# DeepSeek-V3: latent attention, experts with a bias of the choice and shared experts, dense first layers.
#
# Layers for further tokens follow the model's layers and have their numbers; transformers does not write
# them. The keys of a folder tell about them. A folder is written with these layers by the family
# `deepseek_v3_mtp`: as many as the config has.
#
# Source: transformers 5.23, `DeepseekV3Config`, `DeepseekV3ForCausalLM`, `MtpModel` and its
# `conversion_mapping`.


@prefix_is_optional("model.")
def deepseek_v3_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of DeepSeek-V3, with the layers for further tokens that the keys have."""
    count = count_of(config, "num_hidden_layers")
    pattern = re.compile(r"(?:model\.)?layers\.(\d+)\.enorm\.weight")
    numbers = sorted(int(match[1]) for match in map(pattern.fullmatch, keys) if match is not None)
    if numbers != list(range(count, count + len(numbers))):
        raise MapError(
            f"The folder has layers for further tokens with the numbers {numbers}, which do not follow the "
            f"{count} layers of config.json. Give the config of the model.",
            key="num_hidden_layers",
        )
    return _deepseek_rules(config, keys, further=len(numbers))


def deepseek_v3_mtp_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of DeepSeek-V3 with layers for further tokens, also for a folder to be written."""
    if keys:
        return deepseek_v3_rules(config, keys)
    further = count_of(config, "num_nextn_predict_layers", "num_mtp_layers")
    return _deepseek_rules(config, keys, further=further)


def _deepseek_rules(config: Config, keys: Collection[str], *, further: int) -> FamilyRules:
    config = with_defaults(config, keys, q_lora_rank=1536, first_k_dense_replace=3, n_shared_experts=1)
    count = count_of(config, "num_hidden_layers")
    dense = min(size_or_zero(config, "first_k_dense_replace"), count)
    rules = [*outer_rules(config), *_deepseek_layer_rules(config, range(dense), keys, has_experts=False)]
    rules += _deepseek_layer_rules(config, range(dense, count), keys, has_experts=True)
    for number in range(further):
        inner = _deepseek_layer_rules(config, (count + number,), keys, has_experts=dense < count)
        rules += _deepseek_further_rules(inner, number, count + number)
    sizes = latent_sizes(config)
    if dense < count:
        expert = size_of(config, "moe_intermediate_size")
        sizes |= {"e": expert, "s": expert * count_of(config, "n_shared_experts")}
        sizes |= {"expert": count_of(config, "n_routed_experts", "num_local_experts")}
    return FamilyRules(tuple(rules), sizes)


def _deepseek_layer_rules(
    config: Config, layers: Sequence[int], keys: Collection[str], *, has_experts: bool
) -> list[Rule]:
    """Return the rules of some layers, which may be none."""
    if not layers:
        return []
    rules = [*norm_rules(layers), *latent_attention_rules(config, layers)]
    if has_experts:
        return [*rules, *expert_rules(layers, keys, EXPERT_NAMES), *_deepseek_expert_rules(layers)]
    return [*rules, *gated_mlp_rules(layers)]


def _deepseek_further_rules(inner: Sequence[Rule], number: int, theirs: int) -> list[Rule]:
    """Return the rules of a layer for further tokens: those of the layer in it, and its own."""
    ours, other = f"mtp.layers.{number}.", THEIRS.format(layer=theirs)
    names = (
        ("enorm", "enorm", "h"),
        ("hnorm", "hnorm", "h"),
        ("final_layernorm", "shared_head.norm", "h"),
        ("eh_proj", "eh_proj", "h 2h"),
    )
    own = [Rule(ours=f"{ours}{a}.weight", theirs=f"{other}{b}.weight", axes=axes) for a, b, axes in names]
    return own + rules_elsewhere(inner, f"{ours}transformer_layer.", other)


def latent_attention_rules(config: Config, layers: Sequence[int]) -> list[Rule]:
    """Return the rules of latent attention; its axes are those of `latent_sizes`."""
    ours, theirs = "self_attention.linear_", "self_attn."
    rules = [
        layer_rule(f"{ours}kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight", "kv_down h", layers),
        layer_rule("self_attention.kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", "kv_lora", layers),
        layer_rule(f"{ours}kv_up_proj.weight", f"{theirs}kv_b_proj.weight", "kv kv_lora", layers),
        layer_rule(f"{ours}proj.weight", f"{theirs}o_proj.weight", "h values", layers),
    ]
    rules += _query_rules(config, layers)
    if config.get("attention_bias"):
        rules += [
            layer_rule(f"{ours}kv_down_proj.bias", f"{theirs}kv_a_proj_with_mqa.bias", "kv_down", layers),
            layer_rule(f"{ours}proj.bias", f"{theirs}o_proj.bias", "h", layers),
        ]
    return rules


def _query_rules(config: Config, layers: Sequence[int]) -> list[Rule]:
    """Return the rules of queries, which have low ranks if the config has `q_lora_rank`."""
    ours, theirs = "self_attention.linear_", "self_attn."
    if config.get("q_lora_rank") is None:
        return [layer_rule(f"{ours}q_proj.weight", f"{theirs}q_proj.weight", "q h", layers)]
    rules = [
        layer_rule(f"{ours}q_down_proj.weight", f"{theirs}q_a_proj.weight", "q_lora h", layers),
        layer_rule("self_attention.q_layernorm.weight", f"{theirs}q_a_layernorm.weight", "q_lora", layers),
        layer_rule(f"{ours}q_up_proj.weight", f"{theirs}q_b_proj.weight", "q q_lora", layers),
    ]
    if config.get("attention_bias"):
        rules.append(layer_rule(f"{ours}q_down_proj.bias", f"{theirs}q_a_proj.bias", "q_lora", layers))
    return rules


def latent_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a decoder with latent attention, by the names of axes in rules.

    These are the sizes of `decoder_sizes`, and:

    * `q_lora`: the latent features of queries; `kv_lora`: those of keys and values.
    * `kv_down`: `kv_lora` and the rotated part of keys.
    * `kv`: all value heads, and all key heads without the rotated part; `values`: all value heads.
    """
    plain, rotary = size_of(config, "qk_nope_head_dim"), size_of(config, "qk_rope_head_dim")
    sizes = decoder_sizes({**config, "head_dim": plain + rotary, "num_key_value_heads": None})
    value, features = size_of(config, "v_head_dim"), size_of(config, "kv_lora_rank")
    sizes |= {
        "kv_lora": features,
        "kv_down": features + rotary,
        "kv": sizes["heads"] * (plain + value),
        "values": sizes["heads"] * value,
    }
    return sizes if config.get("q_lora_rank") is None else {**sizes, "q_lora": size_of(config, "q_lora_rank")}


def _deepseek_expert_rules(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of what experts have in addition to those of Qwen."""
    shared, bias = "mlp.shared_experts", "mlp.gate.e_score_correction_bias"
    return [
        # Its steps are far smaller than its values: rounded, it would choose other experts.
        layer_rule("mlp.router.expert_bias", bias, "expert", layers, keeps_dtype=True),
        *gated_mlp_rules(layers, shared, shared, axis="s"),
    ]


def size_or_zero(config: Config, name: str) -> int:
    """Return a size of a config that may be 0."""
    return 0 if config.get(name) == 0 else size_of(config, name)


DEEPSEEK_V3 = Family("deepseek_v3", ("deepseek_v3",), deepseek_v3_rules)
DEEPSEEK_V3_MTP = Family("deepseek_v3_mtp", (), deepseek_v3_mtp_rules)
