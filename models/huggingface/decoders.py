"""The GPT that a Hugging Face `config.json` describes.

A field that changes what the model computes is read, or an error that names it. Missing fields have the
values of the family's class in transformers.

Source: transformers 4.57 and 5.23, `models/*/configuration_*.py` and `modeling_*.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megackpt.errors import DeclarationError
from models.block_config import (
    AttentionConfig,
    LearnedPositions,
    MLPConfig,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
)
from models.config import GPTConfig, LayerBlocks
from models.huggingface import defaults
from models.huggingface.attention import (
    delta_net,
    interleaved,
    latent_attention,
    layers_with_delta_net,
    rotary_by_layer_type,
    rotary_of,
)
from models.huggingface.experts import deepseek_experts, gpt_oss_experts, mixtral_experts, qwen_experts
from models.huggingface.fields import WITHOUT_EFFECT, ConfigFields
from models.huggingface.mamba import mamba2, nemotron_h


def gpt_config(config: Mapping[str, Any], *, ignored: Collection[str] = ()) -> GPTConfig:
    """Return the model that a `config.json` describes. Pure.

    Choices of a run are not taken from it: the dtype is float32, dropout is 0, and seq_length is the longest
    sequence that the model is made for. Change them with `dataclasses.replace`.

    Args:
        config: the parsed file, as transformers 4 or 5 write it.
        ignored: names of fields that the caller knows to change nothing.

    Raises:
        DeclarationError: a family or field that is not supported, a value that is not in its range, or sizes
            that do not fit together. The message has its name.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        hint = " Give its text_config." if "text_config" in config else ""
        raise DeclarationError(
            f"config.json: model_type {family!r} is not supported; {', '.join(sorted(_FAMILIES))} are.{hint}",
            key="model_type",
        )
    read, values = _FAMILIES[family]
    fields = ConfigFields(config, {**defaults.COMMON, **values})
    fields.skip({*WITHOUT_EFFECT, *ignored})
    fields.require("is_encoder_decoder", None, False)
    fields.require("add_cross_attention", None, False)
    model = read(fields)
    fields.check_all_read()
    return model


def _llama(fields: ConfigFields) -> GPTConfig:
    model = _decoder(fields, _attention_with_biases(fields), rotary_of(fields))
    return replace(model, mlp=replace(model.mlp, bias=fields.flag("mlp_bias")))


def _mistral(fields: ConfigFields) -> GPTConfig:
    return _decoder(fields, replace(_attention(fields), window=_window(fields)), rotary_of(fields))


def _mixtral(fields: ConfigFields) -> GPTConfig:
    return replace(_mistral(fields), moe=mixtral_experts(fields))


def _phi3(fields: ConfigFields) -> GPTConfig:
    """Phi-3, which rotates a part of each head. Its longer sequences have a scaling that is not supported."""
    fields.skip(("original_max_position_embeddings",))  # used by that scaling only
    attention = replace(_attention(fields), window=_window(fields))
    rotary = rotary_of(fields, partial=True)
    if rotary.scaling is not None:
        name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
        raise fields.error(name, "is not supported; null, or rope_type default, is")
    return _decoder(fields, attention, rotary)


def _qwen2(fields: ConfigFields) -> GPTConfig:
    window = _switched_window(fields, _layer_types(fields, _is_after_max_window_layers))
    return _decoder(fields, replace(_attention(fields), qkv_bias=True, window=window), rotary_of(fields))


def _qwen3(fields: ConfigFields) -> GPTConfig:
    window = _switched_window(fields, _layer_types(fields, _is_after_max_window_layers))
    attention = replace(_attention_with_biases(fields), qk_norm=True, window=window)
    return _decoder(fields, attention, rotary_of(fields))


def _qwen2_moe(fields: ConfigFields) -> GPTConfig:
    window = _switched_window(fields, _layer_types(fields, _has_no_window))
    attention = replace(_attention(fields), qkv_bias=fields.flag("qkv_bias"), window=window)
    model = _decoder(fields, attention, rotary_of(fields))
    return replace(model, moe=qwen_experts(fields, shared=True))


def _qwen3_moe(fields: ConfigFields) -> GPTConfig:
    fields.skip(("max_window_layers",))  # all layers have the window, if there is one
    attention = replace(_attention_with_biases(fields), qk_norm=True, window=_switched_window(fields))
    model = _decoder(fields, attention, rotary_of(fields))
    return replace(model, moe=qwen_experts(fields, shared=False))


def _qwen3_next(fields: ConfigFields) -> GPTConfig:
    fields.require("use_sliding_window", None, False)
    attention = replace(_attention_with_biases(fields), qk_norm=True, output_gate=True)
    model = _decoder(fields, attention, rotary_of(fields, partial=True))
    model = replace(model, norm=NormConfig(zero_centred=True), moe=qwen_experts(fields, shared=True))
    sizes, layers = delta_net(fields), layers_with_delta_net(fields)
    blocks: tuple[LayerBlocks, ...] = tuple(
        ("delta_net" if has_delta_net else "attention", mlp)
        for has_delta_net, (_, mlp) in zip(layers, model.blocks, strict=True)
    )
    moe = None if model.moe is None else replace(model.moe, layer_freq=1)
    return replace(model, layer_blocks=blocks, delta_net=sizes if any(layers) else None, moe=moe)


def _gpt_oss(fields: ConfigFields) -> GPTConfig:
    fields.skip(("initial_context_length",))  # not looked at
    window = _window(fields, _layer_types(fields, _is_even))
    attention = replace(_attention_with_biases(fields), sinks=True, window=window)
    return replace(_decoder(fields, attention, rotary_of(fields)), moe=gpt_oss_experts(fields))


def _deepseek_v3(fields: ConfigFields) -> GPTConfig:
    """DeepSeek-V3 without layers that predict further tokens: transformers computes the same without them."""
    fields.skip(("num_nextn_predict_layers", "num_mtp_layers"))
    rotary = interleaved(rotary_of(fields), fields)
    model = _decoder(fields, latent_attention(fields), rotary)
    return replace(model, moe=deepseek_experts(fields))


def _gemma2(fields: ConfigFields) -> GPTConfig:
    window = _window(fields, _layer_types(fields, _is_even))
    softcap = fields.number("attn_logit_softcapping") if fields.has("attn_logit_softcapping") else None
    attention = replace(_attention_with_biases(fields), window=window, softcap=softcap)
    return _gemma(fields, attention, rotary_of(fields))


def _gemma3(fields: ConfigFields) -> GPTConfig:
    fields.require("attn_logit_softcapping", None)  # transformers does not look at it
    whole, windowed = rotary_by_layer_type(fields)
    window = _window(fields, _layer_types(fields, _is_before_the_last_of_a_pattern))
    if window is not None:
        window = replace(window, rotary=windowed)
    return _gemma(fields, replace(_attention_with_biases(fields), window=window, qk_norm=True), whole)


def _gemma(fields: ConfigFields, attention: AttentionConfig, rotary: RotaryConfig) -> GPTConfig:
    """What Gemma 2 and 3 have in common."""
    fields.skip(("hidden_act", "sliding_window_size"))  # neither is looked at
    fields.require("use_bidirectional_attention", None, False)
    attention = replace(attention, scale=fields.number("query_pre_attn_scalar") ** -0.5)
    softcap = fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None
    return replace(
        _decoder(fields, attention, rotary, activation="hidden_activation"),
        norm=NormConfig(zero_centred=True, after_blocks=True),
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
        logit_softcap=softcap,
    )


def _gpt2(fields: ConfigFields) -> GPTConfig:
    fields.require("scale_attn_by_inverse_layer_idx", None, False)
    fields.skip(("n_ctx",))  # an older name of n_positions, which is not looked at
    hidden = fields.integer("n_embd")
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("n_layer"),
        num_heads=fields.integer("n_head"),
        ffn_hidden_size=fields.integer("n_inner") if fields.has("n_inner") else 4 * hidden,
        seq_length=fields.integer("n_positions"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        linear_bias=True,
        norm_eps=fields.number("layer_norm_epsilon"),
        positions=LearnedPositions(count=fields.integer("n_positions")),
        norm=NormConfig(kind="layer"),
        attention=AttentionConfig(scale=None if fields.flag("scale_attn_weights") else 1.0),
        mlp=MLPConfig(gated=False, activation=fields.activation("activation_function")),
    )


def _decoder(
    fields: ConfigFields, attention: AttentionConfig, rotary: RotaryConfig, *, activation: str = "hidden_act"
) -> GPTConfig:
    """Return a decoder with RMSNorm, rotary positions and gated MLPs, in the names of Llama."""
    groups = "num_key_value_heads"
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        num_query_groups=fields.integer(groups) if fields.has(groups) else None,
        ffn_hidden_size=fields.integer("intermediate_size"),
        seq_length=fields.integer("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        positions=rotary,
        attention=attention,
        mlp=MLPConfig(activation=fields.activation(activation)),
    )


def _attention(fields: ConfigFields) -> AttentionConfig:
    return AttentionConfig(head_dim=fields.integer("head_dim") if fields.has("head_dim") else None)


def _attention_with_biases(fields: ConfigFields) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    return replace(_attention(fields), qkv_bias=bias, output_bias=bias)


def _window(fields: ConfigFields, layers: tuple[bool, ...] | None = None) -> SlidingWindow | None:
    """Return the window of the layers that have one; None for `layers` stands for all of them.

    Raises:
        DeclarationError: layers have a window, but its size is missing.
    """
    if layers is not None and not any(layers):
        fields.skip(("sliding_window",))
        return None
    if fields.has("sliding_window"):
        return SlidingWindow(size=fields.integer("sliding_window"), layers=layers)
    if layers is not None:
        raise fields.error("sliding_window", "must be a positive integer, as layers have a window")
    return None


def _switched_window(fields: ConfigFields, layers: tuple[bool, ...] | None = None) -> SlidingWindow | None:
    """Return the window as `_window` does, if `use_sliding_window` is true."""
    if fields.flag("use_sliding_window"):
        return _window(fields, layers)
    fields.skip(("sliding_window",))
    if layers is not None and any(layers):
        raise fields.error("use_sliding_window", "must be true, as layers have a window")
    return None


def _layer_types(fields: ConfigFields, is_windowed: Callable[[ConfigFields, int], bool]) -> tuple[bool, ...]:
    """Return for each layer whether it has a window: by `layer_types`, or by the family's rule without it."""
    count = fields.integer("num_hidden_layers")
    types = fields.value("layer_types")
    fields.skip(("max_window_layers", "sliding_window_pattern"))
    if types is None:
        return tuple(is_windowed(fields, layer) for layer in range(count))
    if not isinstance(types, list | tuple) or set(types) - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "is not supported; full_attention and sliding_attention are")
    if len(types) != count:
        raise fields.error("layer_types", f"must have one type for each of {count} layers")
    return tuple(name == "sliding_attention" for name in types)


def _is_even(fields: ConfigFields, layer: int) -> bool:
    return layer % 2 == 0


def _is_after_max_window_layers(fields: ConfigFields, layer: int) -> bool:
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return False
    return layer >= fields.integer("max_window_layers", at_least=0)


def _has_no_window(fields: ConfigFields, layer: int) -> bool:
    """The rule of Qwen2-MoE, which has one only if windows are off.

    With windows, transformers 4 masks all layers, and transformers 5 those of even number.
    """
    if fields.flag("use_sliding_window"):
        raise fields.error(
            "layer_types", "has to list the layers with the window: transformers 4 and 5 differ"
        )
    return False


def _is_before_the_last_of_a_pattern(fields: ConfigFields, layer: int) -> bool:
    return bool((layer + 1) % fields.integer("sliding_window_pattern"))


_FAMILIES: Mapping[Any, tuple[Callable[[ConfigFields], GPTConfig], Mapping[str, Any]]] = {
    "deepseek_v3": (_deepseek_v3, defaults.DEEPSEEK_V3),
    "gemma2": (_gemma2, defaults.GEMMA2),
    "gemma3_text": (_gemma3, defaults.GEMMA3),
    "gpt2": (_gpt2, defaults.GPT2),
    "gpt_oss": (_gpt_oss, defaults.GPT_OSS),
    "llama": (_llama, defaults.LLAMA),
    "mamba2": (mamba2, defaults.MAMBA2),
    "mistral": (_mistral, defaults.MISTRAL),
    "mixtral": (_mixtral, defaults.MIXTRAL),
    "nemotron_h": (nemotron_h, defaults.NEMOTRON_H),
    "phi3": (_phi3, defaults.PHI3),
    "qwen2": (_qwen2, defaults.QWEN2),
    "qwen2_moe": (_qwen2_moe, defaults.QWEN2_MOE),
    "qwen3": (_qwen3, defaults.QWEN3),
    "qwen3_moe": (_qwen3_moe, defaults.QWEN3_MOE),
    "qwen3_next": (_qwen3_next, defaults.QWEN3_NEXT),
}
