"""Rules that most decoders share: embeddings, attention, norms and gated MLPs, under Llama's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megackpt.maps.families.sizes import Config
from megackpt.maps.rules import Rule

OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


_QKV = (("q", "q", "q", ""), ("k", "k", "k", ""), ("v", "v", "k", ""))
_GATED_QKV = (
    ("q", "q", "(heads d)", "(heads d@0/2d)"),
    ("gate", "q", "(heads d)", "(heads d@d/2d)"),
    *_QKV[1:],
)
"""Component of ours, projection of theirs, its axis, and that of theirs if it is another one."""


def layer_rule(
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
        theirs=THEIRS + theirs,
        axes=axes,
        their_axes=their_axes,
        layers=tuple(layers),
        keeps_dtype=keeps_dtype,
    )


def rules_elsewhere(rules: Sequence[Rule], ours: str, theirs: str) -> list[Rule]:
    """Return rules of a layer for one that is not among the layers: its keys begin with other names."""
    return [
        replace(
            rule,
            ours=rule.ours.replace(OURS, ours),
            theirs=rule.theirs.replace(THEIRS, theirs),
            layers=(),
        )
        for rule in rules
    ]


def outer_rules(config: Config) -> list[Rule]:
    """Return the rules of what is outside of the layers."""
    rules = [
        Rule(
            ours="embedding.word_embeddings.weight",
            theirs="model.embed_tokens.weight",
            axes="v h",
            is_padded=True,
        ),
        Rule(ours="decoder.final_layernorm.weight", theirs="model.norm.weight", axes="h"),
    ]
    if not config.get("tie_word_embeddings", False):
        rules.append(Rule(ours="output_layer.weight", theirs="lm_head.weight", axes="v h", is_padded=True))
    return rules


def norm_rules(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of the norms before attention and MLP."""
    return [
        layer_rule("input_layernorm.weight", "input_layernorm.weight", "h", layers),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h", layers),
    ]


def attention_rules(
    config: Config,
    layers: Sequence[int],
    *,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    has_qk_norm: bool = False,
    has_output_gate: bool = False,
) -> list[Rule]:
    """Return the rules of attention; None takes the config's `attention_bias`.

    An output gate is in the projection of queries, rows of each head after those of its query.
    """
    bias = bool(config.get("attention_bias"))
    qkv, output = (bias if choice is None else choice for choice in (qkv_bias, output_bias))
    rules = [
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h q", layers),
    ]
    rules += _qkv_rules(_GATED_QKV if has_output_gate else _QKV, layers, has_bias=qkv)
    if output:
        rules.append(layer_rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "h", layers))
    for part in "qk" if has_qk_norm else "":
        ours, theirs = f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight"
        rules.append(layer_rule(ours, theirs, "d", layers))
    return rules


def _qkv_rules(
    parts: Sequence[tuple[str, str, str, str]], layers: Sequence[int], *, has_bias: bool
) -> Iterator[Rule]:
    """Yield the rules of the components of our fused projection, given as in `_QKV`."""
    ours = "self_attention.linear_qkv"
    for part, projection, axis, their_axis in parts:
        theirs = f"self_attn.{projection}_proj"
        their_axes = f"{their_axis} h" if their_axis else ""
        yield layer_rule(f"{ours}.weight.{part}", f"{theirs}.weight", f"{axis} h", layers, their_axes)
        if has_bias:
            yield layer_rule(f"{ours}.bias.{part}", f"{theirs}.bias", axis, layers, their_axis)


def gated_mlp_rules(layers: Sequence[int], *, has_bias: bool = False) -> list[Rule]:
    """Return the rules of a gated MLP."""
    rules = [layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h i", layers)]
    for part in ("gate", "up"):
        rules.append(layer_rule(f"mlp.linear_fc1.weight.{part}", f"mlp.{part}_proj.weight", "i h", layers))
        if has_bias:
            rules.append(layer_rule(f"mlp.linear_fc1.bias.{part}", f"mlp.{part}_proj.bias", "i", layers))
    if has_bias:
        rules.append(layer_rule("mlp.linear_fc2.bias", "mlp.down_proj.bias", "h", layers))
    return rules
