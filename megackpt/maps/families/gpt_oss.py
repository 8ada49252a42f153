"""GPT-OSS: fused experts with transposed matrices, gate and up by turns, biases, and attention sinks.

Its published weights are quantised (MXFP4), which is no matter of boxes: they have to be dequantised first.

Source: transformers 5.23, `GptOssConfig` and `GptOssForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megackpt.maps.families.decoder import attention_rules, layer_rule, norm_rules, outer_rules
from megackpt.maps.families.prefixes import prefix_is_optional
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule


@prefix_is_optional("model.")
def gpt_oss_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of GPT-OSS in floating point."""
    config = with_defaults(config, keys, num_key_value_heads=8, head_dim=64, attention_bias=True)
    layers = range(count_of(config, "num_hidden_layers"))
    rules = [*outer_rules(config), *norm_rules(layers), *attention_rules(config, layers)]
    rules.append(layer_rule("self_attention.softmax_offset", "self_attn.sinks", "heads", layers))
    sizes = decoder_sizes(config)
    sizes |= {"e": sizes["i"], "expert": count_of(config, "num_local_experts", "num_experts")}
    return FamilyRules((*rules, *_expert_rules(layers)), sizes)


def _expert_rules(layers: Sequence[int]) -> list[Rule]:
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
