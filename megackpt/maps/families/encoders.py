"""BERT, T5 and mT5: models with an encoder; T5 and mT5 also have a decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

# BERT: an encoder with norms after its blocks, with a head for masked tokens or with a pooler.
#
# Source: transformers 4.57 and 5.23, `BertConfig`, `BertForMaskedLM` and `BertModel`.

_LINEAR = {
    "self_attention.linear_qkv.{kind}.q": ("attention.self.query", "q h"),
    "self_attention.linear_qkv.{kind}.k": ("attention.self.key", "q h"),
    "self_attention.linear_qkv.{kind}.v": ("attention.self.value", "q h"),
    "self_attention.linear_proj.{kind}": ("attention.output.dense", "h q"),
    "mlp.linear_fc1.{kind}": ("intermediate.dense", "i h"),
    "mlp.linear_fc2.{kind}": ("output.dense", "h i"),
}
_NORMS = {"attention_layernorm": "attention.output.LayerNorm", "mlp_layernorm": "output.LayerNorm"}
_HEAD = "cls.predictions"


def bert_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of BERT. The keys tell which parts it has, or else `architectures` of the config.

    Keys of `BertModel` have no prefix, and a pooler; those of `BertForMaskedLM` have a head instead.
    """
    config = with_defaults(config, keys, type_vocab_size=2, max_position_embeddings=512)
    if config.get("tie_word_embeddings") is False:
        raise MapError(
            "config.json: tie_word_embeddings is false, but the map is of BERT with a tied output layer. Tie "
            "it, or leave the field out.",
            key="tie_word_embeddings",
        )
    has_prefix, has_head, has_pooler = _parts_of(config, keys)
    prefix = "bert." if has_prefix else ""
    rules = [*_embedding_rules(prefix), *_layer_rules(prefix, range(count_of(config, "num_hidden_layers")))]
    rules += _head_rules() if has_head else []
    if has_pooler:
        rules += _both("pooler.dense", f"{prefix}pooler.dense", "h o")
    hidden = size_of(config, "hidden_size")
    sizes = {
        **decoder_sizes(config),
        "p": size_of(config, "max_position_embeddings"),
        "t": size_of(config, "type_vocab_size"),
        "o": hidden,
    }
    return FamilyRules(tuple(rules), sizes)


def _parts_of(config: Config, keys: Collection[str]) -> tuple[bool, bool, bool]:
    """Return whether keys begin with `bert.`, and whether there are a head and a pooler."""
    if not keys:
        is_encoder = list(config.get("architectures") or ()) == ["BertModel"]
        return not is_encoder, not is_encoder, is_encoder
    return (
        any(key.startswith("bert.") for key in keys),
        any(key.startswith(_HEAD) for key in keys),
        any("pooler." in key for key in keys),
    )


def _both(ours: str, theirs: str, axes: str, layers: Sequence[int] = ()) -> Iterator[Rule]:
    """Yield the rules of a weight, with one axis or two, and its bias; `{kind}` in keys, or their end."""
    for kind, own in (("weight", axes), ("bias", axes.split()[0])):
        left, right = (key if "{kind}" in key else f"{key}.{{kind}}" for key in (ours, theirs))
        yield Rule(
            ours=left.replace("{kind}", kind),
            theirs=right.replace("{kind}", kind),
            axes=own,
            layers=tuple(layers),
        )


def _embedding_rules(prefix: str) -> Iterator[Rule]:
    theirs = f"{prefix}embeddings"
    words = f"{theirs}.word_embeddings.weight"
    yield Rule(ours="embedding.word_embeddings.weight", theirs=words, axes="v h", is_padded=True)
    for ours, name, axis in (
        ("position_embeddings", "position_embeddings", "p"),
        ("tokentype_embeddings", "token_type_embeddings", "t"),
    ):
        yield Rule(ours=f"embedding.{ours}.weight", theirs=f"{theirs}.{name}.weight", axes=f"{axis} h")
    yield from _both("embedding.layernorm", f"{theirs}.LayerNorm", "h")


def _layer_rules(prefix: str, layers: Sequence[int]) -> Iterator[Rule]:
    ours, theirs = "encoder.layers.{layer}.", f"{prefix}encoder.layer.{{layer}}."
    for own, (name, axes) in _LINEAR.items():
        yield from _both(ours + own, theirs + name, axes, layers)
    for own, name in _NORMS.items():
        yield from _both(ours + own, theirs + name, "h", layers)


def _head_rules() -> Iterator[Rule]:
    yield from _both("lm_head.dense", f"{_HEAD}.transform.dense", "h o")
    yield from _both("lm_head.layer_norm", f"{_HEAD}.transform.LayerNorm", "h")
    yield Rule(ours="output_layer.bias", theirs=f"{_HEAD}.bias", axes="v", is_padded=True)


BERT = Family("bert", ("bert",), bert_rules)


# T5 and mT5: an encoder and a decoder with cross attention, and a table of relative positions in each.
#
# Source: transformers 4.57 and 5.23, `T5Config` and `T5ForConditionalGeneration`; `MT5Config` likewise.

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
    return _t5_rules(config, keys, is_tied=is_tied)


def mt5_rules(config: Config, keys: Collection[str]) -> FamilyRules:
    """Return the rules of mT5, whose output layer is not tied, whatever the config says."""
    return _t5_rules(with_defaults(config, keys, feed_forward_proj="gated-gelu"), keys, is_tied=False)


def _t5_rules(config: Config, keys: Collection[str], *, is_tied: bool) -> FamilyRules:
    words = Rule(ours="embedding.word_embeddings.weight", theirs="shared.weight", axes="v h", is_padded=True)
    rules = [words]
    if "lm_head.weight" in keys if keys else not is_tied:
        rules.append(Rule(ours="output_layer.weight", theirs="lm_head.weight", axes="v h", is_padded=True))
    count = decoder_count = count_of(config, "num_layers")
    if config.get("num_decoder_layers") is not None:
        decoder_count = count_of(config, "num_decoder_layers")
    mlp = _GATED_MLP if str(config["feed_forward_proj"]).startswith("gated-") else _MLP
    rules += _t5_stack_rules("encoder", range(count), mlp)
    rules += _t5_stack_rules("decoder", range(decoder_count), mlp)
    return FamilyRules(tuple(rules), _t5_sizes(config))


def _t5_sizes(config: Config) -> dict[str, int]:
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


def _t5_stack_rules(stack: str, layers: Sequence[int], mlp: Mapping[str, str]) -> Iterator[Rule]:
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
                axes=_t5_axes(own),
                layers=tuple(layers),
            )


def _t5_axes(ours: str) -> str:
    if "norm" in ours:
        return "h"
    if "mlp" in ours:
        return "h i" if "linear_fc2" in ours else "i h"
    return "h q" if "linear_proj" in ours else "q h"


T5 = Family("t5", ("t5",), t5_rules)
MT5 = Family("mt5", ("mt5",), mt5_rules)
