"""Gemma, Gemma 2 and the text model of Gemma 3: tied embeddings, and norms stored as what is added to 1.

Their norms stay as they are: that a norm is zero-centred is a choice of the model, not of its arrays.

Source: transformers 5.23, `GemmaConfig`, `Gemma2Config`, `Gemma3TextConfig` and their models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megackpt.maps.families.decoder import (
    attention_rules,
    gated_mlp_rules,
    layer_rule,
    norm_rules,
    outer_rules,
)
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule


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
    return _rules(config, keys, has_qk_norm=False)


@prefix_is_optional("model.")
def gemma3_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of Gemma 3, whose queries and keys pass a norm."""
    config = {"vocab_size": 262208, "num_attention_heads": 8, **config}  # original folders leave them out
    return _rules(config, keys, has_qk_norm=True)


def _rules(config: Config, keys: Collection[str], *, has_qk_norm: bool) -> FamilyRules:
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
