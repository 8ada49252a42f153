"""DeepSeek-V3: latent attention, experts with a bias of the choice and shared experts, dense first layers.

Folders have one array for each expert and projection; transformers holds them fused in memory, and some
folders, too. Layers for further tokens follow the model's layers and have their numbers; transformers does
not write them. The keys of a folder tell about both. A folder is written with these layers by the family
`deepseek_v3_mtp`: as many as the config has.

Source: transformers 5.23, `DeepseekV3Config`, `DeepseekV3ForCausalLM`, `MtpModel` and its
`conversion_mapping`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.decoder import (
    THEIRS,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    outer_rules,
    rules_elsewhere,
)
from megackpt.maps.families.experts import expert_rules
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")


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
    return _rules(config, keys, further=len(numbers))


def deepseek_v3_mtp_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of DeepSeek-V3 with layers for further tokens, also for a folder to be written."""
    if keys:
        return deepseek_v3_rules(config, keys)
    return _rules(config, keys, further=count_of(config, "num_nextn_predict_layers", "num_mtp_layers"))


def _rules(config: Config, keys: Collection[str], *, further: int) -> FamilyRules:
    config = with_defaults(config, keys, q_lora_rank=1536, first_k_dense_replace=3, n_shared_experts=1)
    count = count_of(config, "num_hidden_layers")
    dense = min(size_or_zero(config, "first_k_dense_replace"), count)
    rules = [*outer_rules(config), *_layer_rules(config, range(dense), keys, has_experts=False)]
    rules += _layer_rules(config, range(dense, count), keys, has_experts=True)
    for number in range(further):
        inner = _layer_rules(config, (count + number,), keys, has_experts=dense < count)
        rules += _further_rules(inner, number, count + number)
    sizes = latent_sizes(config)
    if dense < count:
        expert = size_of(config, "moe_intermediate_size")
        sizes |= {"e": expert, "s": expert * count_of(config, "n_shared_experts")}
        sizes |= {"expert": count_of(config, "n_routed_experts", "num_local_experts")}
    return FamilyRules(tuple(rules), sizes)


def _layer_rules(
    config: Config, layers: Sequence[int], keys: Collection[str], *, has_experts: bool
) -> list[Rule]:
    """Return the rules of some layers, which may be none."""
    if not layers:
        return []
    rules = [*norm_rules(layers), *latent_attention_rules(config, layers)]
    if has_experts:
        return [*rules, *expert_rules(layers, keys, _EXPERTS), *_deepseek_expert_rules(layers)]
    return [*rules, *gated_mlp_rules(layers)]


def _further_rules(inner: Sequence[Rule], number: int, theirs: int) -> list[Rule]:
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
        layer_rule(f"{shared}.linear_fc1.weight.gate", f"{shared}.gate_proj.weight", "s h", layers),
        layer_rule(f"{shared}.linear_fc1.weight.up", f"{shared}.up_proj.weight", "s h", layers),
        layer_rule(f"{shared}.linear_fc2.weight", f"{shared}.down_proj.weight", "h s", layers),
    ]


def size_or_zero(config: Config, name: str) -> int:
    """Return a size of a config that may be 0."""
    return 0 if config.get(name) == 0 else size_of(config, name)


DEEPSEEK_V3 = Family("deepseek_v3", ("deepseek_v3",), deepseek_v3_rules)
DEEPSEEK_V3_MTP = Family("deepseek_v3_mtp", (), deepseek_v3_mtp_rules)
