"""Phi-3 and Phi-4: queries, keys and values are one matrix, and so are gate and up.

Source: transformers 5.23, `Phi3Config` and `Phi3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Collection

from megackpt.maps.families.decoder import layer_rule, norm_rules, outer_rules
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, with_defaults
from megackpt.maps.family import Family, FamilyRules

# Part of ours, its axes, and its rows in their array.
_QKV = (("q", "q h", "q@0/q+2k h"), ("k", "k h", "k@q/q+2k h"), ("v", "k h", "k@q+k/q+2k h"))
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
    for part, axes, theirs in _QKV:
        ours = f"self_attention.linear_qkv.weight.{part}"
        rules.append(layer_rule(ours, "self_attn.qkv_proj.weight", axes, layers, theirs))
    for part, axes, theirs in _GATE_UP:
        ours = f"mlp.linear_fc1.weight.{part}"
        rules.append(layer_rule(ours, "mlp.gate_up_proj.weight", axes, layers, theirs))
    return FamilyRules(tuple(rules), decoder_sizes(config))


PHI3 = Family("phi3", ("phi3",), phi3_rules)
