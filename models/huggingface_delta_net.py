"""Gated delta nets of Hugging Face models, read from `config.json`.

Source: transformers 5.23, `Qwen3NextConfig` and `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from models.block_config import DeltaNetConfig
from models.huggingface_fields import ConfigFields


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
