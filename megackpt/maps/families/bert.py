"""BERT: an encoder with norms after its blocks, with a head for masked tokens or with a pooler.

Source: transformers 4.57 and 5.23, `BertConfig`, `BertForMaskedLM` and `BertModel`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megackpt.errors import MapError
from megackpt.maps.families.sizes import Config, count_of, decoder_sizes, size_of, with_defaults
from megackpt.maps.family import Family, FamilyRules
from megackpt.maps.rules import Rule

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
