"""T5 and mT5: an encoder and a decoder with cross attention, and a table of relative positions in each.

Source: transformers 4.57 and 5.23, `T5Config` and `T5ForConditionalGeneration`; `MT5Config` likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megackpt.maps.families.sizes import Config, count_of, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

_ATTENTION = {
    "linear_qkv.weight.q": "q",
    "linear_qkv.weight.k": "k",
    "linear_qkv.weight.v": "v",
    "linear_proj.weight": "o",
}
_CROSS_ATTENTION = {
    "linear_q.weight": "q",
    "linear_kv.weight.k": "k",
    "linear_kv.weight.v": "v",
    "linear_proj.weight": "o",
}
_MLP = {"linear_fc1.weight": "wi", "linear_fc2.weight": "wo"}
_GATED_MLP = {"linear_fc1.weight.gate": "wi_0", "linear_fc1.weight.up": "wi_1", "linear_fc2.weight": "wo"}


def t5_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of T5. Its output layer is tied unless the keys, or the config, say otherwise.

    transformers 5 writes `tie_word_embeddings` also if weights are not tied, but then without
    `scale_decoder_outputs`.
    """
    config = with_defaults(config, keys, feed_forward_proj="relu")
    is_tied = all(config.get(name) is not False for name in ("tie_word_embeddings", "scale_decoder_outputs"))
    return _rules(config, keys, is_tied=is_tied)


def mt5_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of mT5, whose output layer is not tied, whatever the config says."""
    return _rules(with_defaults(config, keys, feed_forward_proj="gated-gelu"), keys, is_tied=False)


def _rules(config: Config, keys: Collection[str], *, is_tied: bool) -> FamilyRules:
    words = Rule(ours="embedding.word_embeddings.weight", theirs="shared.weight", axes="v h", is_padded=True)
    rules = [words]
    if "lm_head.weight" in keys if keys else not is_tied:
        rules.append(Rule(ours="output_layer.weight", theirs="lm_head.weight", axes="v h", is_padded=True))
    count = decoder_count = count_of(config, "num_layers")
    if config.get("num_decoder_layers") is not None:
        decoder_count = count_of(config, "num_decoder_layers")
    mlp = _GATED_MLP if str(config["feed_forward_proj"]).startswith("gated-") else _MLP
    rules += _stack_rules("encoder", range(count), mlp)
    rules += _stack_rules("decoder", range(decoder_count), mlp)
    return FamilyRules(tuple(rules), _sizes(config))


def _sizes(config: Config) -> dict[str, int]:
    heads, head_dim = count_of(config, "num_heads"), size_of(config, "d_kv")
    buckets = "relative_attention_num_buckets"
    return {
        "v": size_of(config, "vocab_size"),
        "h": size_of(config, "d_model"),
        "i": size_of(config, "d_ff"),
        "q": heads * head_dim,
        "d": head_dim,
        "b": 32 if config.get(buckets) is None else size_of(config, buckets),
        "heads": heads,
        "groups": heads,
    }


def _stack_rules(stack: str, layers: Sequence[int], mlp: Mapping[str, str]) -> Iterator[Rule]:
    """Yield the rules of encoder or decoder."""
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Rule(ours=f"{stack}.relative_positions.weight", theirs=first, axes="b heads")
    yield Rule(ours=f"{stack}.final_layernorm.weight", theirs=f"{stack}.final_layer_norm.weight", axes="h")
    blocks = [
        ("input_layernorm", "self_attention", "SelfAttention", _ATTENTION),
        ("pre_mlp_layernorm", "mlp", "DenseReluDense", mlp),
    ]
    if stack == "decoder":
        blocks.insert(1, ("pre_cross_attn_layernorm", "cross_attention", "EncDecAttention", _CROSS_ATTENTION))
    for number, (norm, ours, theirs, names) in enumerate(blocks):
        arrays = {f"{norm}.weight": "layer_norm.weight"}
        arrays |= {f"{ours}.{own}": f"{theirs}.{other}.weight" for own, other in names.items()}
        for own, other in arrays.items():
            yield Rule(
                ours=f"{stack}.layers.{{layer}}.{own}",
                theirs=f"{stack}.block.{{layer}}.layer.{number}.{other}",
                axes=_axes(own),
                layers=tuple(layers),
            )


def _axes(ours: str) -> str:
    if "norm" in ours:
        return "h"
    if "mlp" in ours:
        return "h i" if "linear_fc2" in ours else "i h"
    return "h q" if "linear_proj" in ours else "q h"


T5 = Family("t5", ("t5",), t5_rules)
MT5 = Family("mt5", ("mt5",), mt5_rules)
