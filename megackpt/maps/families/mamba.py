"""Mamba-2, and Nemotron-H: layers that are a Mamba-2 mixer, attention, an MLP or experts.

The input projection of a mixer is one matrix in their folders, and so are the channels of its convolution.
Folders have one array for each expert and projection; transformers holds them fused in memory, and some
folders, too. Layers for further tokens are not in the map.

Source: transformers 5.23, `Mamba2Config`, `NemotronHConfig`, their models, and its `conversion_mapping`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.decoder import OURS, prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

_LAYER = "backbone.layers.{layer}."
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
    rules = [*_outer_rules(config, "backbone."), *_mixer_rules(config, layers)]
    return FamilyRules(tuple(rules), sizes)


@prefix_is_optional("backbone.")
def nemotron_h_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Nemotron-H without layers for further tokens."""
    config = with_defaults(
        config, keys, n_groups=8, conv_kernel=4, use_conv_bias=True, num_key_value_heads=8, head_dim=128
    )
    layers = layers_by_kind(config)
    sizes, rules = decoder_sizes(config), _outer_rules({**config, "tie_word_embeddings": False}, "backbone.")
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
        rules += _expert_rules(config, keys, layers["moe"])
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


def _rule(
    ours: str,
    theirs: str,
    axes: str,
    layers: Sequence[int],
    their_axes: str = "",
    *,
    keeps_dtype: bool = False,
) -> Rule:
    """Return the rule of one array of each layer, by its names inside of the layer."""
    return Rule(
        ours=OURS + ours,
        theirs=_LAYER + theirs,
        axes=axes,
        their_axes=their_axes,
        layers=tuple(layers),
        keeps_dtype=keeps_dtype,
    )


def _outer_rules(config: Config, prefix: str) -> list[Rule]:
    word, output = "embedding.word_embeddings.weight", "output_layer.weight"
    rules = [
        Rule(ours=word, theirs=f"{prefix}embeddings.weight", axes="v h", is_padded=True),
        Rule(ours="decoder.final_layernorm.weight", theirs=f"{prefix}norm_f.weight", axes="h"),
    ]
    if not config.get("tie_word_embeddings", False):
        rules.append(Rule(ours=output, theirs="lm_head.weight", axes="v h", is_padded=True))
    return rules


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


def _expert_rules(config: Config, keys: Collection[str], layers: Sequence[int]) -> list[Rule]:
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
