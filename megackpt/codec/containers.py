"""Codecs of Python's containers, as far as JSON has no node for them.

Owns that a container comes back with its own class, order and options. Subclasses are no business of these
codecs: they would lose their class.
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

from megackpt.codec.hashes import refuse_collisions
from megackpt.codec.kinds import Kind, Reading, Writing, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

# Only these can be the default factory of a defaultdict: a name in a file must never choose what is called.
_FACTORIES: dict[str, type] = {
    factory.__name__: factory
    for factory in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
        OrderedDict, Counter, deque,
    )
}  # fmt: skip


def _encode_dict(value: dict[Any, Any], writing: Writing) -> Json:
    return writing.items(value)


def _decode_dict(tree: Json, reading: Reading) -> dict[Any, Any]:
    return dict(reading.items(tree))


def _encode_tuple(value: tuple[Any, ...], writing: Writing) -> Json:
    return [writing.child(index, item) for index, item in enumerate(value)]


def _decode_tuple(tree: Json, reading: Reading) -> tuple[Any, ...]:
    return tuple(reading.child(index, item) for index, item in enumerate(list_of(tree)))


def _encode_set(value: set[Any] | frozenset[Any], writing: Writing) -> Json:
    return writing.elements(value)


def _decode_set(tree: Json, reading: Reading) -> set[Any]:
    elements = reading.elements(tree)
    refuse_collisions(elements)
    built = set(elements)
    if len(built) != len(elements):
        raise ValueError("an element is repeated")
    return built


def _decode_frozenset(tree: Json, reading: Reading) -> frozenset[Any]:
    return frozenset(_decode_set(tree, reading))


def _encode_ordered_dict(value: OrderedDict[Any, Any], writing: Writing) -> Json:
    return writing.ordered_items(value)


def _decode_ordered_dict(tree: Json, reading: Reading) -> OrderedDict[Any, Any]:
    return OrderedDict(reading.items(tree))


def _encode_default_dict(value: defaultdict[Any, Any], writing: Writing) -> Json:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", None)
    if factory is not None and (name is None or _FACTORIES.get(name) is not factory):
        raise writing.refusal(
            f"The default factory {factory!r} of this defaultdict is a function, which cannot be saved. Save "
            f"dict(value), or use one of {', '.join(_FACTORIES)} or None as the factory."
        )
    return {"factory": name, "items": writing.items(value)}


def _decode_default_dict(tree: Json, reading: Reading) -> defaultdict[Any, Any]:
    name, items = fields_of(tree, "factory", "items")
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"the factory {name!r} is none of {', '.join(_FACTORIES)}")
    factory = None if name is None else _FACTORIES[text_of(name)]
    return defaultdict(factory, reading.items(items))


def _decode_counter(tree: Json, reading: Reading) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, reading.items(tree))  # Counter.update would add
    return counter


def _encode_deque(value: deque[Any], writing: Writing) -> Json:
    items = [writing.child(index, item) for index, item in enumerate(value)]
    return {"maxlen": value.maxlen, "items": items}


def _decode_deque(tree: Json, reading: Reading) -> deque[Any]:
    maxlen, items = fields_of(tree, "maxlen", "items")
    values = _decode_tuple(items, reading)
    limit = None if maxlen is None else integer_of(maxlen)
    if limit is not None and limit < len(values):
        raise ValueError(f"{len(values)} items in a deque of at most {limit}")
    return deque(values, limit)


def _encode_namespace(value: argparse.Namespace | SimpleNamespace, writing: Writing) -> Json:
    return writing.mapping(vars(value))


def _decode_namespace(tree: Json, reading: Reading) -> argparse.Namespace:
    namespace = argparse.Namespace()
    vars(namespace).update(reading.mapping(tree))  # not setattr: names need not be identifiers
    return namespace


def _decode_simple_namespace(tree: Json, reading: Reading) -> SimpleNamespace:
    namespace = SimpleNamespace()
    vars(namespace).update(reading.mapping(tree))
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
