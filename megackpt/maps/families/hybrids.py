"""Mamba-2, Nemotron-H and Qwen3-Next: decoders with layers that are not attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from megackpt.errors import MapError
from megackpt.maps.families.decoder import (
    attention_rules,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    outer_rules,
    prefix_is_optional,
    rules_elsewhere,
)
from megackpt.maps.families.experts import EXPERT_NAMES, expert_rules, qwen_rules, shared_expert_rules
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

# Mamba-2 and Nemotron-H: a layer is a Mamba-2 mixer; in Nemotron-H also attention, an MLP or experts.
#
# The input projection of a mixer is one matrix in their folders, and so are the channels of its convolution.
# Folders have one array for each expert and projection; transformers holds them fused in memory, and some
# folders, too. Layers for further tokens are not in the map.
#
# Source: transformers 5.23, `Mamba2Config`, `NemotronHConfig`, their models, and its `conversion_mapping`.

_rule = partial(layer_rule, their_layer="backbone.layers.{layer}.")
_OUTER = ("backbone.embeddings", "backbone.norm_f")
_KINDS = {
    "mamba": ("M", "mamba", "linear_attention"),
    "attention": ("*", "attention", "full_attention"),
    "mlp": ("-", "mlp"),
    "moe": ("E", "moe"),
}
"""The kinds of layers, and their names in configs."""

# Component, its axis, and its rows in their array, where x, B and C have the same order in both.
_IN_PROJ = (
    ("z", "inner", "inner@0"),
    ("x", "inner", "inner@inner"),
    ("B", "state", "state@2inner"),
    ("C", "state", "state@2inner+state"),
    ("dt", "steps", "steps@2inner+2state"),
)
_CONVOLUTION = (("x", "inner", "inner@0"), ("B", "state", "state@inner"), ("C", "state", "state@inner+state"))


@prefix_is_optional("backbone.")
def mamba2_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Mamba-2, all of whose layers are mixers."""
    config = with_defaults(config, keys, n_groups=8, head_dim=64, conv_kernel=4, use_conv_bias=True)
    layers = range(count_of(config, "num_hidden_layers"))
    sizes = {"v": size_of(config, "vocab_size"), "h": size_of(config, "hidden_size")}
    sizes |= _mixer_sizes(config, "num_heads", "head_dim", "state_size")
    rules = [*outer_rules(config, *_OUTER), *_mixer_rules(config, layers)]
    return FamilyRules(tuple(rules), sizes)


@prefix_is_optional("backbone.")
def nemotron_h_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Nemotron-H without layers for further tokens."""
    config = with_defaults(
        config, keys, n_groups=8, conv_kernel=4, use_conv_bias=True, num_key_value_heads=8, head_dim=128
    )
    layers = layers_by_kind(config)
    sizes, rules = decoder_sizes(config), outer_rules({**config, "tie_word_embeddings": False}, *_OUTER)
    if mixers := layers["mamba"]:
        sizes |= _mixer_sizes(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
        rules += _mixer_rules(config, mixers)
    if layers["attention"]:
        rules += _attention_rules(layers["attention"])
    if layers["mlp"]:
        rules += [_norm_rule("pre_mlp_layernorm", layers["mlp"])]
        rules += _mlp_rules("mlp.", "mixer.", "i", layers["mlp"], has_bias=bool(config.get("mlp_bias")))
    if layers["moe"]:
        sizes |= {
            "e": size_of(config, "moe_intermediate_size"),
            "s": size_of(config, "moe_shared_expert_intermediate_size"),
            "expert": count_of(config, "n_routed_experts", "num_local_experts"),
        }
        rules += _nemotron_h_expert_rules(config, keys, layers["moe"])
    return FamilyRules(tuple(rules), sizes)


def layers_by_kind(config: Config) -> dict[str, list[int]]:
    """Return the layers of each kind: mamba, attention, mlp, moe.

    Raises:
        MapError: the config does not say which kinds its layers are, or has an unknown kind.
    """
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = next((config[name] for name in names if config.get(name)), None)
    known = {name: kind for kind, spelled in _KINDS.items() for name in spelled}
    if not isinstance(kinds, str | list | tuple) or not {*map(str, kinds)} <= known.keys():
        raise MapError(
            f"config.json: layers_block_type is {kinds!r}. It must have one of {', '.join(known)} for each "
            f"layer.",
            key="layers_block_type",
        )
    layers: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for number, kind in enumerate(kinds):
        layers[known[kind]].append(number)
    return layers


def _norm_rule(ours: str, layers: Sequence[int]) -> Rule:
    return _rule(f"{ours}.weight", "norm.weight", "h", layers)


def _mixer_sizes(config: Config, heads: str, head_dim: str, state: str) -> dict[str, int]:
    """Return the sizes of a mixer; `state` are those of all groups together, and `steps` the heads."""
    steps = count_of(config, heads)
    return {
        "inner": steps * size_of(config, head_dim),
        "state": count_of(config, "n_groups") * size_of(config, state),
        "steps": steps,
        "kernel": size_of(config, "conv_kernel"),
    }


def _mixer_rules(config: Config, layers: Sequence[int]) -> list[Rule]:
    rules = [
        _norm_rule("norm", layers),
        # The state decays by exp(-exp(A_log) * ...): float32 in every model of ours.
        *(
            _rule(f"mixer.{name}", f"mixer.{name}", "steps", layers, keeps_dtype=True)
            for name in ("A_log", "D", "dt_bias")
        ),
        _rule("mixer.norm.weight", "mixer.norm.weight", "inner", layers),
        _rule("mixer.out_proj.weight", "mixer.out_proj.weight", "h inner", layers),
    ]
    has_bias = bool(config.get("use_bias"))
    rules += _part_rules("in_proj", _IN_PROJ, "/2inner+2state+steps", "h", layers, has_bias=has_bias)
    rules += _part_rules(
        "conv1d", _CONVOLUTION, "/inner+2state", "0/1 kernel", layers, has_bias=bool(config["use_conv_bias"])
    )
    if has_bias:
        rules.append(_rule("mixer.out_proj.bias", "mixer.out_proj.bias", "h", layers))
    return rules


def _part_rules(
    module: str,
    parts: Sequence[tuple[str, str, str]],
    whole: str,
    inner: str,
    layers: Sequence[int],
    *,
    has_bias: bool,
) -> Iterator[Rule]:
    """Yield the rules of a module's parts: ours are arrays of their own, theirs are ranges of dim 0.

    Args:
        module: its name in a mixer.
        parts: of each, its name, its axis, and its range of dim 0 without the extent.
        whole: the extent of dim 0, as rules have it.
        inner: the axes after dim 0 of the weight.
        layers: the layers that have such a mixer.
        has_bias: whether the module has a bias.
    """
    weight, bias = f"mixer.{module}.weight", f"mixer.{module}.bias"
    for part, axis, at in parts:
        yield _rule(f"{weight}.{part}", weight, f"{axis} {inner}", layers, f"{at}{whole} {inner}")
        if has_bias:
            yield _rule(f"{bias}.{part}", bias, axis, layers, at + whole)


def _attention_rules(layers: Sequence[int]) -> list[Rule]:
    return [
        _norm_rule("input_layernorm", layers),
        _rule("self_attention.linear_proj.weight", "mixer.o_proj.weight", "h q", layers),
        *(
            _rule(f"self_attention.linear_qkv.weight.{part}", f"mixer.{part}_proj.weight", axes, layers)
            for part, axes in (("q", "q h"), ("k", "k h"), ("v", "k h"))
        ),
    ]


def _mlp_rules(ours: str, theirs: str, axis: str, layers: Sequence[int], *, has_bias: bool) -> list[Rule]:
    """Return the rules of an MLP that is not gated; `axis` is what is inside of it."""
    rules = [
        _rule(f"{ours}linear_fc1.weight", f"{theirs}up_proj.weight", f"{axis} h", layers),
        _rule(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", f"h {axis}", layers),
    ]
    if has_bias:
        rules += [
            _rule(f"{ours}linear_fc1.bias", f"{theirs}up_proj.bias", axis, layers),
            _rule(f"{ours}linear_fc2.bias", f"{theirs}down_proj.bias", "h", layers),
        ]
    return rules


def _nemotron_h_expert_rules(config: Config, keys: Collection[str], layers: Sequence[int]) -> list[Rule]:
    is_fused = any(key.endswith(".mixer.experts.up_proj") for key in keys)
    experts = "mixer.experts.{}_proj" if is_fused else "mixer.experts.{{expert}}.{}_proj.weight"
    shared, has_bias = "shared_experts.", bool(config.get("mlp_bias"))
    bias = "mixer.gate.e_score_correction_bias"
    return [
        _norm_rule("pre_mlp_layernorm", layers),
        _rule("mlp.router.weight", "mixer.gate.weight", "expert h", layers),
        _rule("mlp.router.expert_bias", bias, "expert", layers, keeps_dtype=True),
        _rule("mlp.experts.linear_fc1.weight", experts.format("up"), "expert e h", layers),
        _rule("mlp.experts.linear_fc2.weight", experts.format("down"), "expert h e", layers),
        *_mlp_rules(f"mlp.{shared}", f"mixer.{shared}", "s", layers, has_bias=has_bias),
    ]


MAMBA2 = Family("mamba2", ("mamba2",), mamba2_rules)
NEMOTRON_H = Family("nemotron_h", ("nemotron_h",), nemotron_h_rules)


# Qwen3-Next: layers with a gated delta net or with gated attention, experts, and a gated shared expert.
#
# The projections of a gated delta net are joined by key head: its query, its key, and the values and gates of
# its value heads follow each other. The published folders have a layer for further tokens (`mtp`), with
# attention, which transformers does not read: the keys of a folder tell. A folder is written with it by the
# family `qwen3_next_mtp`.
# Source: transformers 5.23, `Qwen3NextConfig` and `Qwen3NextForCausalLM`; Megatron-Bridge `Qwen3NextBridge`
# (names of `mtp`).

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
    return _qwen3_next_rules(config, keys, has_further="mtp.fc.weight" in keys)


def qwen3_next_mtp_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen3-Next with the layer for further tokens, also for a folder to be written."""
    return qwen3_next_rules(config, keys) if keys else _qwen3_next_rules(config, keys, has_further=True)


def _qwen3_next_rules(config: Config, keys: Collection[str], *, has_further: bool) -> FamilyRules:
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
    further = _qwen3_next_further_rules(config, keys) if has_further else ()
    return FamilyRules((*made.rules, *further), {**made.sizes, **delta_net_sizes(config)})


def _qwen3_next_further_rules(config: Config, keys: Collection[str]) -> list[Rule]:
    """Return the rules of the layer for further tokens: attention, and experts if the last layer has them."""
    last = (count_of(config, "num_hidden_layers") - 1,)
    inner = [*norm_rules(last), *attention_rules(config, last, has_qk_norm=True, has_output_gate=True)]
    if set(last).issubset(layers_with_experts(config)):
        inner += [*expert_rules(last, keys, EXPERT_NAMES), *shared_expert_rules(last)]
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
