"""Qwen3-Next: layers with a gated delta net or with gated attention, experts, and a gated shared expert.

The projections of a gated delta net are joined by key head: its query, its key, and the values and gates of
its value heads follow each other. The published folders have a layer for further tokens (`mtp`), with
attention, which transformers does not read: the keys of a folder tell. A folder is written with it by the
family `qwen3_next_mtp`.

Source: transformers 5.23, `Qwen3NextConfig` and `Qwen3NextForCausalLM`; Megatron-Bridge `Qwen3NextBridge`
(names of `mtp`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.decoder import (
    attention_rules,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    prefix_is_optional,
    rules_elsewhere,
)
from megackpt.maps.families.experts import QWEN, expert_rules, qwen_rules, shared_expert_rules
from megackpt.maps.families.sizes import (
    Config,
    count_of,
    layers_with_experts,
    size_of,
    with_defaults,
)
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

# Component of ours, its rows, and their rows in the array of theirs, where the key heads are outermost.
_QKVZ = (
    ("query", "(groups_k kd)", "(groups_k kd@0/2kd+2gv)"),
    ("key", "(groups_k kd)", "(groups_k kd@kd/2kd+2gv)"),
    ("value", "(groups_k gv)", "(groups_k gv@2kd/2kd+2gv)"),
    ("z", "(groups_k gv)", "(groups_k gv@2kd+gv/2kd+2gv)"),
)
_BA = (
    ("beta", "(groups_k gh)", "(groups_k gh@0/2gh)"),
    ("alpha", "(groups_k gh)", "(groups_k gh@gh/2gh)"),
)
_CONV = (("query", "kk", "kk@0/2kk+vv"), ("key", "kk", "kk@kk/2kk+vv"), ("value", "vv", "vv@2kk/2kk+vv"))


_FURTHER = (
    ("enorm", "pre_fc_norm_embedding", "h"),
    ("hnorm", "pre_fc_norm_hidden", "h"),
    ("final_layernorm", "norm", "h"),
    ("eh_proj", "fc", "h 2h"),
)
"""What a layer for further tokens has in addition to others: our name, theirs, and the axes."""


@prefix_is_optional("model.")
def qwen3_next_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen3-Next, with the layer for further tokens if the keys have it."""
    return _rules(config, keys, has_further="mtp.fc.weight" in keys)


def qwen3_next_mtp_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen3-Next with the layer for further tokens, also for a folder to be written."""
    return qwen3_next_rules(config, keys) if keys else _rules(config, keys, has_further=True)


def _rules(config: Config, keys: Collection[str], *, has_further: bool) -> FamilyRules:
    config = with_defaults(
        config,
        keys,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    with_delta_net = layers_with_delta_net(config)
    others = [n for n in range(count_of(config, "num_hidden_layers")) if n not in with_delta_net]
    rules = attention_rules(config, others, has_qk_norm=True, has_output_gate=True) if others else []
    if with_delta_net:
        rules += delta_net_rules(with_delta_net)
    made = qwen_rules(config, keys, rules, has_shared_expert=True)
    further = _further_rules(config, keys) if has_further else ()
    return FamilyRules((*made.rules, *further), {**made.sizes, **delta_net_sizes(config)})


def _further_rules(config: Config, keys: Collection[str]) -> list[Rule]:
    """Return the rules of the layer for further tokens: attention, and experts if the last layer has them."""
    last = (count_of(config, "num_hidden_layers") - 1,)
    inner = [*norm_rules(last), *attention_rules(config, last, has_qk_norm=True, has_output_gate=True)]
    if set(last).issubset(layers_with_experts(config)):
        inner += [*expert_rules(last, keys, QWEN), *shared_expert_rules(last)]
    else:
        inner += gated_mlp_rules(last)
    own = [
        Rule(ours=f"mtp.layers.0.{ours}.weight", theirs=f"mtp.{theirs}.weight", axes=axes)
        for ours, theirs, axes in _FURTHER
    ]
    return own + rules_elsewhere(inner, "mtp.layers.0.transformer_layer.", "mtp.layers.0.")


def delta_net_rules(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of gated delta nets; their axes are those of `delta_net_sizes`."""
    ours, theirs = "self_attention", "linear_attn"
    names = (
        ("out_norm.weight", "norm.weight", "vd"),
        ("out_proj.weight", "out_proj.weight", "h vv"),
    )
    rules = [layer_rule(f"{ours}.{a}", f"{theirs}.{b}", axes, layers) for a, b, axes in names]
    # The state decays by exp(-exp(A_log) * ...): float32 in every model of ours.
    rules += [
        layer_rule(f"{ours}.{name}", f"{theirs}.{name}", "heads_v", layers, keeps_dtype=True)
        for name in ("A_log", "dt_bias")
    ]
    for name, parts in (("in_proj_qkvz", _QKVZ), ("in_proj_ba", _BA)):
        for part, rows, their_rows in parts:
            joined = f"{theirs}.{name}.weight"
            rules.append(
                layer_rule(f"{ours}.in_proj.weight.{part}", joined, f"{rows} h", layers, f"{their_rows} h")
            )
    for part, rows, their_rows in _CONV:
        own, axes, their_axes = f"{ours}.conv1d.weight.{part}", f"{rows} 0/1 c", f"{their_rows} 0/1 c"
        rules.append(layer_rule(own, f"{theirs}.conv1d.weight", axes, layers, their_axes))
    return rules


def delta_net_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of gated delta nets, by the names of axes in rules.

    `groups_k` key heads, `heads_v` value heads, `gh` value heads of a key head, `kd` and `vd` one key and one
    value, `kk` all keys, `vv` all values, `gv` those of a key head, `c` the convolution.
    """
    groups, heads = count_of(config, "linear_num_key_heads"), count_of(config, "linear_num_value_heads")
    key, value = size_of(config, "linear_key_head_dim"), size_of(config, "linear_value_head_dim")
    if heads % groups:
        raise MapError(
            f"config.json: linear_num_key_heads {groups} does not divide linear_num_value_heads {heads}.",
            key="linear_num_key_heads",
        )
    return {
        "groups_k": groups,
        "heads_v": heads,
        "gh": heads // groups,
        "kd": key,
        "vd": value,
        "kk": groups * key,
        "vv": heads * value,
        "gv": heads // groups * value,
        "c": size_of(config, "linear_conv_kernel_dim"),
    }


def layers_with_delta_net(config: Config) -> list[int]:
    """Return the layers with a gated delta net: by `layer_types`, or all but each fourth one without it."""
    layers, types = range(count_of(config, "num_hidden_layers")), config.get("layer_types")
    if types is None:
        interval = size_of({"full_attention_interval": 4, **config}, "full_attention_interval")
        return [layer for layer in layers if (layer + 1) % interval]
    known = {"linear_attention", "full_attention"}
    if not isinstance(types, list) or len(types) != len(layers) or not known.issuperset(types):
        raise MapError(
            f"config.json: layer_types is {types!r}. It must be a list of linear_attention or full_attention "
            f"for each of {len(layers)} layers.",
            key="layer_types",
        )
    return [layer for layer in layers if types[layer] == "linear_attention"]


QWEN3_NEXT = Family("qwen3_next", ("qwen3_next",), qwen3_next_rules)
QWEN3_NEXT_MTP = Family("qwen3_next_mtp", (), qwen3_next_mtp_rules)
