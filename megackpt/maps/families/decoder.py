"""Decoders that differ from Llama in little, and the rules that they share.

The families are Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma and GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import TypeAlias

from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

# Rules that many families share. A folder may have the model without its output layer; then its keys lack the
# prefix of the whole model.

RulesFunction: TypeAlias = Callable[[Config, Collection[str]], FamilyRules]


def prefix_is_optional(prefix: str) -> Callable[[RulesFunction], RulesFunction]:
    """Return a decorator for rules of keys with a prefix: a folder may have none of them.

    Such a folder is that of `GPT2Model` instead of `GPT2LMHeadModel`, whose keys begin with `transformer.`.
    """

    def decorator(rules: RulesFunction) -> RulesFunction:
        @wraps(rules)
        def rules_of_folder(config: Config, keys: Collection[str]) -> FamilyRules:
            made = rules(config, keys)
            if not keys or any(key.startswith(prefix) for key in keys):
                return made
            shorter = tuple(replace(rule, theirs=rule.theirs.removeprefix(prefix)) for rule in made.rules)
            return replace(made, rules=shorter)

        return rules_of_folder

    return decorator


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
    their_layer: str = THEIRS,
    keeps_dtype: bool = False,
) -> Rule:
    """Return the rule of one array of each layer, by its names inside of the layer."""
    return Rule(
        ours=OURS + ours,
        theirs=their_layer + theirs,
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


def outer_rules(config: Config, words: str = "model.embed_tokens", norm: str = "model.norm") -> list[Rule]:
    """Return the rules of what is outside of the layers, by their names of the embedding and the norm."""
    ours = "embedding.word_embeddings.weight"
    rules = [
        Rule(ours=ours, theirs=f"{words}.weight", axes="v h", is_padded=True),
        Rule(ours="decoder.final_layernorm.weight", theirs=f"{norm}.weight", axes="h"),
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


def gated_mlp_rules(
    layers: Sequence[int], ours: str = "mlp", theirs: str = "mlp", *, axis: str = "i", has_bias: bool = False
) -> list[Rule]:
    """Return the rules of a gated MLP; `axis` is what is inside of it."""
    fc1, fc2 = f"{ours}.linear_fc1", f"{ours}.linear_fc2"
    rules = [layer_rule(f"{fc2}.weight", f"{theirs}.down_proj.weight", f"h {axis}", layers)]
    for part in ("gate", "up"):
        projection = f"{theirs}.{part}_proj"
        rules.append(layer_rule(f"{fc1}.weight.{part}", f"{projection}.weight", f"{axis} h", layers))
        if has_bias:
            rules.append(layer_rule(f"{fc1}.bias.{part}", f"{projection}.bias", axis, layers))
    if has_bias:
        rules.append(layer_rule(f"{fc2}.bias", f"{theirs}.down_proj.bias", "h", layers))
    return rules


# Llama 2 and 3, Mistral, Qwen2 and Qwen3: dense decoders that differ in biases, norms and defaults only.
#
# Source: transformers 5.23, `LlamaConfig`, `MistralConfig`, `Qwen2Config`, `Qwen3Config` and their models.


@prefix_is_optional("model.")
def llama_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Llama. Attention and MLPs may have biases."""
    config = with_defaults(config, keys)
    return _dense_rules(config, mlp_bias=bool(config.get("mlp_bias")))


@prefix_is_optional("model.")
def mistral_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Mistral, which has no biases."""
    return _dense_rules(with_defaults(config, keys, num_key_value_heads=8), qkv_bias=False, output_bias=False)


@prefix_is_optional("model.")
def qwen2_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen2, whose queries, keys and values have biases."""
    return _dense_rules(with_defaults(config, keys, num_key_value_heads=32), qkv_bias=True, output_bias=False)


@prefix_is_optional("model.")
def qwen3_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Qwen3, whose queries and keys pass a norm."""
    config = with_defaults(config, keys, num_key_value_heads=32, head_dim=128)
    return _dense_rules(config, has_qk_norm=True)


def _dense_rules(
    config: Config,
    *,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    has_qk_norm: bool = False,
    mlp_bias: bool = False,
) -> FamilyRules:
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *norm_rules(layers), *gated_mlp_rules(layers, has_bias=mlp_bias)]
    rules += attention_rules(
        config, layers, qkv_bias=qkv_bias, output_bias=output_bias, has_qk_norm=has_qk_norm
    )
    return FamilyRules(tuple(rules), decoder_sizes(config))


LLAMA = Family("llama", ("llama",), llama_rules)
MISTRAL = Family("mistral", ("mistral",), mistral_rules)
QWEN2 = Family("qwen2", ("qwen2",), qwen2_rules)
QWEN3 = Family("qwen3", ("qwen3",), qwen3_rules)


# Phi-3 and Phi-4: queries, keys and values are one matrix, and so are gate and up.
#
# Source: transformers 5.23, `Phi3Config` and `Phi3ForCausalLM`.

# Part of ours, its axes, and its rows in their array.
_FUSED_QKV = (("q", "q h", "q@0/q+2k h"), ("k", "k h", "k@q/q+2k h"), ("v", "k h", "k@q+k/q+2k h"))
_GATE_UP = (("gate", "i h", "i@0/2i h"), ("up", "i h", "i@i/2i h"))


@prefix_is_optional("model.")
def phi3_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Phi-3, which has no biases."""
    config = with_defaults(config, keys)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [
        *outer_rules(config),
        *norm_rules(layers),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h q", layers),
        layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h i", layers),
    ]
    for part, axes, theirs in _FUSED_QKV:
        ours = f"self_attention.linear_qkv.weight.{part}"
        rules.append(layer_rule(ours, "self_attn.qkv_proj.weight", axes, layers, theirs))
    for part, axes, theirs in _GATE_UP:
        ours = f"mlp.linear_fc1.weight.{part}"
        rules.append(layer_rule(ours, "mlp.gate_up_proj.weight", axes, layers, theirs))
    return FamilyRules(tuple(rules), decoder_sizes(config))


PHI3 = Family("phi3", ("phi3",), phi3_rules)


# Gemma, Gemma 2 and the text model of Gemma 3: tied embeddings, and norms stored as what is added to 1.
#
# Their norms stay as they are: that a norm is zero-centred is a choice of the model, not of its arrays.
#
# Source: transformers 5.23, `GemmaConfig`, `Gemma2Config`, `Gemma3TextConfig` and their models.


@prefix_is_optional("model.")
def gemma_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of the first Gemma, which has Llama's norms."""
    config = with_defaults(config, keys, num_key_value_heads=16, head_dim=256, tie_word_embeddings=True)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *norm_rules(layers), *attention_rules(config, layers)]
    return FamilyRules((*rules, *gated_mlp_rules(layers)), decoder_sizes(config))


@prefix_is_optional("model.")
def gemma2_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Gemma 2, which has norms after attention and MLP, too."""
    return _gemma_rules(config, keys, has_qk_norm=False)


@prefix_is_optional("model.")
def gemma3_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Gemma 3, whose queries and keys pass a norm."""
    config = {"vocab_size": 262208, "num_attention_heads": 8, **config}  # original folders leave them out
    return _gemma_rules(config, keys, has_qk_norm=True)


def _gemma_rules(config: Config, keys: Collection[str], *, has_qk_norm: bool) -> FamilyRules:
    config = with_defaults(config, keys, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *_four_norms(layers), *gated_mlp_rules(layers)]
    rules += attention_rules(config, layers, has_qk_norm=has_qk_norm)
    return FamilyRules(tuple(rules), decoder_sizes(config))


def _four_norms(layers: Sequence[int]) -> list[Rule]:
    """Return the rules of the norms. Llama's `post_attention_layernorm` is `pre_feedforward_layernorm`."""
    return [
        layer_rule("input_layernorm.weight", "input_layernorm.weight", "h", layers),
        layer_rule("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", "h", layers),
        layer_rule("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", "h", layers),
        layer_rule("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "h", layers),
    ]


GEMMA = Family("gemma", ("gemma",), gemma_rules)
GEMMA2 = Family("gemma2", ("gemma2",), gemma2_rules)
GEMMA3 = Family("gemma3", ("gemma3_text",), gemma3_rules)


# GPT-OSS: fused experts with transposed matrices, gate and up by turns, biases, and attention sinks.
#
# Its published weights are quantised (MXFP4), which is no matter of boxes: they have to be dequantised first.
#
# Source: transformers 5.23, `GptOssConfig` and `GptOssForCausalLM`.


@prefix_is_optional("model.")
def gpt_oss_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of GPT-OSS in floating point."""
    config = with_defaults(config, keys, num_key_value_heads=8, head_dim=64, attention_bias=True)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *norm_rules(layers), *attention_rules(config, layers)]
    rules.append(layer_rule("self_attention.softmax_offset", "self_attn.sinks", "heads", layers))
    sizes = decoder_sizes(config)
    sizes |= {"e": sizes["i"], "expert": count_of(config, "num_local_experts", "num_experts")}
    return FamilyRules((*rules, *_gpt_oss_expert_rules(layers)), sizes)


def _gpt_oss_expert_rules(layers: Sequence[int]) -> list[Rule]:
    fc1, fc2, theirs = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.experts"
    rules = [
        layer_rule("mlp.router.weight", "mlp.router.weight", "expert h", layers),
        layer_rule("mlp.router.bias", "mlp.router.bias", "expert", layers),
        layer_rule(f"{fc2}.weight", f"{theirs}.down_proj", "expert h e", layers, "expert e h"),
        layer_rule(f"{fc2}.bias", f"{theirs}.down_proj_bias", "expert h", layers),
    ]
    for part, part_axis in (("gate", "[e 0/2]"), ("up", "[e 1/2]")):
        weight, bias = f"{theirs}.gate_up_proj", f"{theirs}.gate_up_proj_bias"
        rules += [
            layer_rule(f"{fc1}.weight.{part}", weight, "expert e h", layers, f"expert h {part_axis}"),
            layer_rule(f"{fc1}.bias.{part}", bias, "expert e", layers, f"expert {part_axis}"),
        ]
    return rules


GPT_OSS = Family("gpt_oss", ("gpt_oss",), gpt_oss_rules)
