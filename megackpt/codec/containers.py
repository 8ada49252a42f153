"""Codecs of Python's containers that JSON does not have.

A container loads with its class, order and options. Subclasses have no codec here, as they would lose their
class.
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.codec.kinds import (
    REGISTRY,
    Kind,
    ValueDecoder,
    ValueEncoder,
    fields_of,
    integer_of,
    list_of,
    text_of,
)
from megackpt.codec.tree import Json

# Limits on keys that collide in a hash table, with which a forged file could make a load take hours.
#
# A dict compares a key with all others of the same hash, so a million keys of one hash take a million million
# comparisons. Keys of different hashes can collide as well: each looks for a free slot of the table, and keys
# can be chosen so that each finds a million slots taken. Hashes of strings and bytes are salted in each
# process; those of numbers, and of tuples of numbers, are not, so a file can choose them.

MAX_EQUAL_HASHES = 200
"""So many keys may have the same hash by chance."""
MAX_UNCHECKED_KEYS = 1000
"""So many keys cannot take long, however they collide: 1000 slots for each of them."""
# Rounds of probes that a key takes, on average. Keys with random hashes take less than 3, multiples of a
# large power of 2 up to 14, as the upper bits of a hash are used last.
_MAX_ROUNDS = 64
_SALTED_CLASSES = frozenset((str, bytes))


def check_collisions(keys: Sequence[Hashable]) -> None:
    """Reject keys of a dict, or elements of a set, that collide more often than chance allows.

    Raises:
        ValueError: too many have the same hash, or find the same slots of a hash table taken.
        TypeError: a key cannot be hashed.
    """
    if len(keys) <= MAX_EQUAL_HASHES:
        return
    of_class = REGISTRY.of_class  # registered classes may have any hashes
    chosen = [hash(key) for key in keys if type(key) not in _SALTED_CLASSES and of_class(type(key)) is None]
    hashes = np.array(chosen, np.int64)
    in_order = np.sort(hashes)  # not counted in a dict, where the keys of an attack would collide
    if (in_order[MAX_EQUAL_HASHES:] == in_order[:-MAX_EQUAL_HASHES]).any():
        raise ValueError(
            f"more than {MAX_EQUAL_HASHES} keys have the same hash, perhaps to make loading slow"
        )
    if len(hashes) > MAX_UNCHECKED_KEYS and _are_crowded(hashes.view(np.uint64)):
        raise ValueError("keys collide in a hash table, perhaps to make loading slow")


def _are_crowded(hashes: npt.NDArray[np.uint64]) -> bool:
    """Return whether keys with these hashes make a dict or a set slow, at any size that it has as it grows.

    A table grows when it is two thirds full, to at most eight times the number of its keys.
    """
    sizes = range((8 * len(hashes)).bit_length() - 1, MAX_UNCHECKED_KEYS.bit_length(), -1)
    # A set looks at the nine slots after each one, too, where the table has so many.
    return any(
        _takes_long(hashes[: (2 << bits) // 3], bits=bits, neighbours=neighbours)
        for neighbours in (0, 9)
        for bits in sizes
    )


def _takes_long(hashes: npt.NDArray[np.uint64], *, bits: int, neighbours: int) -> bool:
    """Return whether inserting keys into a table of 2**bits slots takes too many probes.

    All keys take their first probe, then those that found no free slot their second one, and so on. The order
    differs from Python's, which inserts one key after another, but the number of probes is about the same.

    Source: CPython, `lookdict` of dictobject.c and `set_add_entry` of setobject.c.
    """
    # In a round, each key without a slot takes one probe; a look at neighbours counts with it.
    mask, budget = np.uint64((1 << bits) - 1), _MAX_ROUNDS * len(hashes)
    # With room behind the table, as neighbours of its last slots are computed too. They stay free.
    taken = np.zeros((1 << bits) + neighbours, np.bool_)
    owner = np.zeros(len(taken), np.int64)
    slot, perturbation = hashes & mask, hashes
    while len(slot):
        budget -= len(slot)
        if budget < 0:
            return True
        for step in range(neighbours + 1):
            at = slot + np.uint64(step)
            is_free = ~taken[at]
            # CPython looks at neighbours only where all of them are in the table.
            if step:
                is_free &= slot + np.uint64(neighbours) <= mask
            # Several keys may want one free slot. It goes to the key that reads its own number back.
            number = np.arange(len(slot))
            owner[at[is_free]] = number[is_free]  # the last one of several gets the slot
            is_placed = is_free & (owner[at] == number)
            taken[at[is_placed]] = True
            slot, perturbation = slot[~is_placed], perturbation[~is_placed]
        # Bits of the hash above the mask come in, five at a time; integers of 64 bits wrap around as in C.
        perturbation = perturbation >> np.uint64(5)
        slot = (slot * np.uint64(5) + perturbation + np.uint64(1)) & mask
    return False


# Classes that only hold data. Only these can be the default factory of a defaultdict: a name in a file must
# never choose what is called.
FACTORIES: dict[str, type] = {
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
    if factory is not None and (name is None or FACTORIES.get(name) is not factory):
        raise encoder.error(
            f"The default factory {factory!r} of this defaultdict is a function, which cannot be saved. Save "
            f"dict(value), or use one of {', '.join(FACTORIES)} or None as the factory."
        )
    return {"factory": name, "items": encoder.items(value)}


def _decode_default_dict(tree: Json, decoder: ValueDecoder) -> defaultdict[Any, Any]:
    name, items = fields_of(tree, "factory", "items")
    if name is not None and name not in FACTORIES:
        raise ValueError(f"the factory {name!r} is not one of {', '.join(FACTORIES)}")
    factory = None if name is None else FACTORIES[text_of(name)]
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
