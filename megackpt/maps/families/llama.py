"""Llama 2 and 3, Mistral, Qwen2 and Qwen3: dense decoders that differ in biases, norms and defaults only.

Source: transformers 5.23, `LlamaConfig`, `MistralConfig`, `Qwen2Config`, `Qwen3Config` and their models.
"""

from __future__ import annotations

from collections.abc import Collection

from megackpt.maps.families.decoder import attention_rules, gated_mlp_rules, norm_rules, outer_rules
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, with_defaults
from megackpt.maps.family import Family, FamilyRules


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
