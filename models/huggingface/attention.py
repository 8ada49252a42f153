"""Attention of Hugging Face models, read from `config.json`: positions, latent attention, delta nets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megackpt.training.parallel import LatentSizes
from models.block_config import (
    AttentionConfig,
    DeltaNetConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
)
from models.huggingface.fields import ConfigFields

# Rotary positions as a Hugging Face `config.json` describes them.
#
# transformers 4 has `rope_theta` and `rope_scaling` in the file itself, transformers 5 puts all of it into
# `rope_parameters`, which may be one mapping for each type of layer. The factor of YaRN is the one that the
# file has, as in version 5; version 4 takes the quotient of the longest and the original length instead.
#
# Source: transformers 4.57 and 5.23, `modeling_rope_utils`.


def rotary_of(fields: ConfigFields, *, partial: bool = False) -> RotaryConfig:
    """Return the rotary positions that all layers have.

    Args:
        fields: those of the file.
        partial: whether models of this family look at `partial_rotary_factor`.

    Raises:
        DeclarationError: a kind of scaling or a parameter that is not supported.
    """
    # The older spelling counts if a file has both.
    scaling, parameters = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    name = "rope_scaling" if scaling else "rope_parameters"
    outer = {key: fields.value(key) for key in ("rope_theta", "partial_rotary_factor")}
    return rotary_in(fields, name, scaling or parameters, outer, partial=partial)


def rotary_by_layer_type(fields: ConfigFields) -> tuple[RotaryConfig, RotaryConfig]:
    """Return the rotary positions of layers that see all tokens, and of those with a window (Gemma 3).

    Raises:
        DeclarationError: a kind of scaling or a parameter that is not supported.
    """
    by_type = fields.inside("rope_parameters", fields.mapping("rope_parameters"), {})
    whole, windowed = by_type.mapping("full_attention"), by_type.mapping("sliding_attention")
    by_type.check_all_read()
    whole = {**whole, **fields.mapping("rope_scaling")}
    bases = {"rope_theta": fields.value("rope_theta")}, {"rope_theta": fields.value("rope_local_base_freq")}
    return (
        rotary_in(fields, "rope_parameters.full_attention", whole, bases[0]),
        rotary_in(fields, "rope_parameters.sliding_attention", windowed, bases[1]),
    )


def rotary_in(
    fields: ConfigFields,
    name: str,
    parameters: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    partial: bool = False,
) -> RotaryConfig:
    """Return the rotary positions of one mapping of parameters.

    Args:
        fields: those of the file.
        name: that of the mapping, for errors.
        parameters: the mapping.
        outer: parameters that it may leave out, as the file has them.
        partial: whether models of this family look at `partial_rotary_factor`.
    """
    length = fields.integer("max_position_embeddings")
    original = parameters.get("original_max_position_embeddings") or length
    inner = fields.inside(name, parameters, {**outer, "original_max_position_embeddings": original})
    fraction = inner.value("partial_rotary_factor")
    if not partial and fraction not in (None, 1, 1.0):
        raise inner.error("partial_rotary_factor", "models of this family do not have")
    scaling = _scaling(inner, length)
    base = inner.number("rope_theta")
    inner.check_all_read()
    return RotaryConfig(base=base, fraction=1.0 if fraction is None else float(fraction), scaling=scaling)


def _scaling(rope: ConfigFields, length: int) -> RotaryScaling | None:
    kind = rope.value("rope_type") or rope.value("type") or "default"
    rope.skip(("type", "rope_type"))  # some files have both
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    if kind == "dynamic":
        return DynamicScaling(factor=rope.number("factor"), original_length=length)
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
            original_length=rope.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(rope, length)
    raise rope.error(
        "rope_type" if rope.has("rope_type") else "type",
        "is not supported; default, linear, dynamic, llama3 and yarn are",
    )


def _yarn(rope: ConfigFields, length: int) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor") if rope.has("factor") else length / original
    return YarnScaling(
        factor=factor,
        original_length=original,
        fast_turns=rope.number("beta_fast") if rope.value("beta_fast") else 32.0,
        slow_turns=rope.number("beta_slow") if rope.value("beta_slow") else 1.0,
        magnitude=_magnitude(rope, factor),
        whole_dims=rope.flag("truncate") if rope.has("truncate") else True,
    )


def _magnitude(rope: ConfigFields, factor: float) -> float | None:
    """Return what sines and cosines are multiplied by; None for the usual function of the factor."""
    weights = rope.value("mscale"), rope.value("mscale_all_dim")
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if not all(weights):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (rope.number("mscale") * growth + 1.0) / (rope.number("mscale_all_dim") * growth + 1.0)


# Latent attention of Hugging Face models, read from `config.json`.
#
# Source: transformers 5.23, `DeepseekV3Config` and `DeepseekV3Attention`.


def latent_attention(fields: ConfigFields) -> AttentionConfig:
    """Return the attention of DeepSeek-V3.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", None, heads)
    fields.skip(("head_dim", "qk_head_dim"))  # sums of others
    bias = fields.flag("attention_bias")
    latent = LatentSizes(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        qk_head_dim=fields.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    scale = latent.head_dim**-0.5 * _scale_of_scores(fields)
    return AttentionConfig(latent=latent, qkv_bias=bias, output_bias=bias, scale=scale)


def interleaved(rotary: RotaryConfig, fields: ConfigFields) -> RotaryConfig:
    """Return rotary positions with the pairs that `rope_interleave` says."""
    return replace(rotary, interleaved=fields.flag("rope_interleave"))


def _scale_of_scores(fields: ConfigFields) -> float:
    """Return the factor on scores that goes with scaled rotary positions, by `mscale_all_dim`."""
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    growth, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if not growth or not factor or factor <= 1:
        return 1.0
    scale: float = (0.1 * growth * math.log(factor) + 1.0) ** 2
    return scale


# Gated delta nets of Hugging Face models, read from `config.json`.
#
# Source: transformers 5.23, `Qwen3NextConfig` and `Qwen3NextGatedDeltaNet`.


def delta_net(fields: ConfigFields) -> DeltaNetConfig:
    """Return the gated delta nets of Qwen3-Next.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    if fields.activation("hidden_act") != "silu":
        raise fields.error("hidden_act", "is not supported for gated delta nets; silu is")
    return DeltaNetConfig(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel_size=fields.integer("linear_conv_kernel_dim"),
    )


def layers_with_delta_net(fields: ConfigFields) -> tuple[bool, ...]:
    """Return for each layer whether it has a gated delta net: by `layer_types`, or by the interval.

    Raises:
        DeclarationError: a field that is missing, or has a value that is not supported.
    """
    count, types = fields.integer("num_hidden_layers"), fields.value("layer_types")
    interval = fields.integer("full_attention_interval")
    if types is None:
        return tuple(bool((layer + 1) % interval) for layer in range(count))
    if not isinstance(types, list | tuple) or set(types) - {"full_attention", "linear_attention"}:
        raise fields.error("layer_types", "is not supported; full_attention and linear_attention are")
    if len(types) != count:
        raise fields.error("layer_types", f"must have one type for each of {count} layers")
    return tuple(name == "linear_attention" for name in types)
