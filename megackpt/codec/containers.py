"""Codecs of Python's containers that JSON does not have.

A container loads with its class, order and options. Subclasses have no codec here, as they would lose their
class.
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

from megackpt.codec.hashes import check_collisions
from megackpt.codec.kinds import Kind, ValueDecoder, ValueEncoder, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

# Only these can be the default factory of a defaultdict: a name in a file must never choose what is called.
_FACTORIES: dict[str, type] = {
    factory.__name__: factory
    for factory in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
        OrderedDict, Counter, deque,
    )
}  # fmt: skip


def _encode_dict(value: dict[Any, Any], encoder: ValueEncoder) -> Json:
    return encoder.items(value)


def _decode_dict(tree: Json, decoder: ValueDecoder) -> dict[Any, Any]:
    return dict(decoder.items(tree))


def _encode_tuple(value: tuple[Any, ...], encoder: ValueEncoder) -> Json:
    return [encoder.child(index, item) for index, item in enumerate(value)]


def _decode_tuple(tree: Json, decoder: ValueDecoder) -> tuple[Any, ...]:
    return tuple(decoder.child(index, item) for index, item in enumerate(list_of(tree)))


def _encode_set(value: set[Any] | frozenset[Any], encoder: ValueEncoder) -> Json:
    return encoder.elements(value)


def _decode_set(tree: Json, decoder: ValueDecoder) -> set[Any]:
    elements = decoder.elements(tree)
    check_collisions(elements)
    values = set(elements)
    if len(values) != len(elements):
        raise ValueError("an element is repeated")
    return values


def _decode_frozenset(tree: Json, decoder: ValueDecoder) -> frozenset[Any]:
    return frozenset(_decode_set(tree, decoder))


def _encode_ordered_dict(value: OrderedDict[Any, Any], encoder: ValueEncoder) -> Json:
    return encoder.ordered_items(value)


def _decode_ordered_dict(tree: Json, decoder: ValueDecoder) -> OrderedDict[Any, Any]:
    return OrderedDict(decoder.items(tree))


def _encode_default_dict(value: defaultdict[Any, Any], encoder: ValueEncoder) -> Json:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", None)
    if factory is not None and (name is None or _FACTORIES.get(name) is not factory):
        raise encoder.error(
            f"The default factory {factory!r} of this defaultdict is a function, which cannot be saved. Save "
            f"dict(value), or use one of {', '.join(_FACTORIES)} or None as the factory."
        )
    return {"factory": name, "items": encoder.items(value)}


def _decode_default_dict(tree: Json, decoder: ValueDecoder) -> defaultdict[Any, Any]:
    name, items = fields_of(tree, "factory", "items")
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"the factory {name!r} is not one of {', '.join(_FACTORIES)}")
    factory = None if name is None else _FACTORIES[text_of(name)]
    return defaultdict(factory, decoder.items(items))


def _decode_counter(tree: Json, decoder: ValueDecoder) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, decoder.items(tree))  # Counter.update would add
    return counter


def _encode_deque(value: deque[Any], encoder: ValueEncoder) -> Json:
    items = [encoder.child(index, item) for index, item in enumerate(value)]
    return {"maxlen": value.maxlen, "items": items}


def _decode_deque(tree: Json, decoder: ValueDecoder) -> deque[Any]:
    maxlen, items = fields_of(tree, "maxlen", "items")
    values = _decode_tuple(items, decoder)
    limit = None if maxlen is None else integer_of(maxlen)
    if limit is not None and limit < len(values):
        raise ValueError(f"{len(values)} items in a deque of at most {limit}")
    return deque(values, limit)


def _encode_namespace(value: argparse.Namespace | SimpleNamespace, encoder: ValueEncoder) -> Json:
    return encoder.mapping(vars(value))


def _decode_namespace(tree: Json, decoder: ValueDecoder) -> argparse.Namespace:
    namespace = argparse.Namespace()
    vars(namespace).update(decoder.mapping(tree))  # not setattr: names need not be identifiers
    return namespace


def _decode_simple_namespace(tree: Json, decoder: ValueDecoder) -> SimpleNamespace:
    namespace = SimpleNamespace()
    vars(namespace).update(decoder.mapping(tree))
    return namespace


KINDS = (
    Kind("$dict", (dict,), _encode_dict, _decode_dict),
    Kind("$tuple", (tuple,), _encode_tuple, _decode_tuple),
    Kind("$set", (set,), _encode_set, _decode_set),
    Kind("$frozenset", (frozenset,), _encode_set, _decode_frozenset),
    Kind("$ordereddict", (OrderedDict,), _encode_ordered_dict, _decode_ordered_dict),
    Kind("$defaultdict", (defaultdict,), _encode_default_dict, _decode_default_dict),
    Kind("$counter", (Counter,), _encode_dict, _decode_counter),
    Kind("$deque", (deque,), _encode_deque, _decode_deque),
    Kind("$namespace", (argparse.Namespace,), _encode_namespace, _decode_namespace),
    Kind("$simplenamespace", (SimpleNamespace,), _encode_namespace, _decode_simple_namespace),
)
