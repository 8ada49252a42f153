"""GPT-2: learned positions, biases, LayerNorm, and matrices stored transposed (`Conv1D`).

Source: transformers 5.23, `GPT2Config` and `GPT2LMHeadModel`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from megackpt.errors import MapError
from megackpt.maps.families.decoder import layer_rule, outer_rules, prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

_rule = partial(layer_rule, their_layer="transformer.h.{layer}.")


@prefix_is_optional("transformer.")
def gpt2_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of GPT-2 without cross-attention."""
    config = with_defaults(config, keys, tie_word_embeddings=True)
    if config.get("add_cross_attention"):
        raise MapError(
            "config.json: add_cross_attention is set, and the map has no rules for cross-attention. Use a "
            "model without it.",
            key="add_cross_attention",
        )
    layers = range(count_of(config, "n_layer"))
    rules = (*_outer_rules(config), *_attention_rules(layers), *_norm_and_mlp_rules(layers))
    return FamilyRules(rules, _sizes(config))


def _sizes(config: Config) -> dict[str, int]:
    hidden, heads = size_of(config, "n_embd"), count_of(config, "n_head")
    if hidden % heads:
        raise MapError(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}.", key="n_embd")
    inner = 4 * hidden if config.get("n_inner") is None else size_of(config, "n_inner")
    return {
        "v": size_of(config, "vocab_size"),
        "p": size_of(config, "n_positions"),
        "h": hidden,
        "q": hidden,
        "i": inner,
        "d": hidden // heads,
        "heads": heads,
        "groups": heads,
    }


def _outer_rules(config: Config) -> list[Rule]:
    positions, norm = "embedding.position_embeddings.weight", "transformer.ln_f"
    return [
        *outer_rules(config, "transformer.wte", norm),
        Rule(ours=positions, theirs="transformer.wpe.weight", axes="p h"),
        Rule(ours="decoder.final_layernorm.bias", theirs=f"{norm}.bias", axes="h"),
    ]


def _attention_rules(layers: Sequence[int]) -> list[Rule]:
    rules = [
        _rule("self_attention.linear_proj.weight", "attn.c_proj.weight", "h q", layers, "q h"),
        _rule("self_attention.linear_proj.bias", "attn.c_proj.bias", "h", layers),
    ]
    for part, part_axis in (("q", "q@0/3q"), ("k", "q@q/3q"), ("v", "q@2q/3q")):
        ours, theirs = "self_attention.linear_qkv", "attn.c_attn"
        rules.append(_rule(f"{ours}.weight.{part}", f"{theirs}.weight", "q h", layers, f"h {part_axis}"))
        rules.append(_rule(f"{ours}.bias.{part}", f"{theirs}.bias", "q", layers, part_axis))
    return rules


def _norm_and_mlp_rules(layers: Sequence[int]) -> list[Rule]:
    rules = [
        _rule("mlp.linear_fc1.weight", "mlp.c_fc.weight", "i h", layers, "h i"),
        _rule("mlp.linear_fc1.bias", "mlp.c_fc.bias", "i", layers),
        _rule("mlp.linear_fc2.weight", "mlp.c_proj.weight", "h i", layers, "i h"),
        _rule("mlp.linear_fc2.bias", "mlp.c_proj.bias", "h", layers),
    ]
    for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
        for kind in ("weight", "bias"):
            rules.append(_rule(f"{ours}.{kind}", f"{theirs}.{kind}", "h", layers))
    return rules


GPT2 = Family("gpt2", ("gpt2",), gpt2_rules)
