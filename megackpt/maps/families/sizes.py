"""Reading the sizes of a model from the `config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from megackpt.errors import MapError
from megackpt.maps.families.quantised import check_not_quantised

Config: TypeAlias = Mapping[str, Any]
"""The parsed `config.json` of a Hugging Face folder."""

_LARGEST = 2**31 - 1
"""Largest extent of an axis."""

_MOST = 10_000
"""Most layers, experts or heads of a model."""


def with_defaults(config: Config, keys: Collection[str], **defaults: object) -> Config:
    """Return a config with the defaults of its family for what it does not name.

    Args:
        config: the config.
        keys: of the folder; none for one to be written.
        **defaults: of the family, where they decide which arrays there are and of which shape.

    Raises:
        MapError: the weights are quantised.
    """
    check_not_quantised(config, keys)
    return {**defaults, **config}


def size_of(config: Config, *names: str) -> int:
    """Return the first of some sizes that a config has.

    Raises:
        MapError: it has none of them, or it is not a positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or not 0 < value <= _LARGEST:
                raise MapError(
                    f"config.json: {name} is {value!r}. Give a positive integer of at most {_LARGEST}.",
                    key=name,
                )
            return value
    raise MapError(
        f"config.json has no {' or '.join(names)}, which the map needs. Give the config of the model.",
        key=names[0],
    )


def count_of(config: Config, *names: str) -> int:
    """Return the first of some numbers of layers, experts or heads that a config has.

    Raises:
        MapError: it has none of them, or it is not a positive integer, or more than any model has. A map has
            a pair for each, so that a wrong number would cost memory without end.
    """
    count = size_of(config, *names)
    if count > _MOST:
        raise MapError(
            f"config.json: {names[0]} is {count}, and at most {_MOST} are supported. Correct the config.",
            key=names[0],
        )
    return count


def decoder_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that decoders have in common, by the names of axes in rules.

    `v` vocabulary, `h` hidden state, `i` inside of the MLP, `d` one head, `q` all query heads, `k` all key
    (or value) heads, `heads` queries, `groups` keys.
    """
    hidden, heads = size_of(config, "hidden_size"), count_of(config, "num_attention_heads")
    groups = heads if config.get("num_key_value_heads") is None else count_of(config, "num_key_value_heads")
    head_dim = _head_dim(config, hidden, heads)
    if heads % groups:
        raise MapError(
            f"config.json: num_key_value_heads {groups} does not divide num_attention_heads {heads}.",
            key="num_key_value_heads",
        )
    return {
        "v": size_of(config, "vocab_size"),
        "h": hidden,
        "i": size_of(config, "intermediate_size"),
        "d": head_dim,
        "q": heads * head_dim,
        "k": groups * head_dim,
        "heads": heads,
        "groups": groups,
    }


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return size_of(config, "head_dim")
    if hidden % heads:
        raise MapError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there "
            f"is no head_dim. Give head_dim.",
            key="head_dim",
        )
    return hidden // heads


def layers_with_experts(config: Config) -> list[int]:
    """Return the layers of a Qwen model that have experts instead of one MLP."""
    if 0 in (config.get("num_experts"), config.get("num_local_experts")):
        return []
    step = 1 if config.get("decoder_sparse_step") is None else size_of(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise MapError(
            f"config.json: mlp_only_layers is {dense!r}. It must be a list of layers.", key="mlp_only_layers"
        )
    layers = range(count_of(config, "num_hidden_layers"))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
