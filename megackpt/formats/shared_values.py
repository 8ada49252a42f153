"""Limits how large a value of a pickle is that contains other values several times.

A pickle can refer to one list from many places. If each of n lists contains the next one twice, the value has
2**n elements for everything that walks through it, in a few bytes of pickle.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterable
from typing import Any

from megackpt.codec.pickled import ForeignObject, ForeignShardedTensor

_SEQUENCES = (list, tuple, set, frozenset)
_FOREIGN = (ForeignObject, ForeignShardedTensor)
_CONTAINERS = (*_SEQUENCES, dict, argparse.Namespace, types.SimpleNamespace, *_FOREIGN)


_PER_BYTE = 32  # elements of a value for a byte of its pickle: a reference to a small container takes two
_ALWAYS = 2**18  # elements that the smallest pickle may have


def check_repeated_values(value: Any, *, nbytes: int) -> None:
    """Check that a value from a pickle of so many bytes has elements in proportion.

    Each element counts as often as a walk through the value meets it, but each container is visited once. A
    reference to a container that it is inside of counts as one element: a walk has to end there.

    Raises:
        ValueError: the value has more elements.
    """
    counts: dict[int, int] = {}
    stack: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while stack:
        container, items = stack.pop()
        if items is not None:
            # All containers in it have been counted, but those that it is inside of.
            counts[id(container)] = 1 + sum(counts.get(id(item), 1) for item in items)
            if counts[id(container)] > _PER_BYTE * nbytes + _ALWAYS:
                raise ValueError("values are repeated in each other without measure")
        elif isinstance(container, _CONTAINERS) and id(container) not in counts:
            counts[id(container)] = 1
            # It comes off the stack twice: now, and after all that is in it, to be added up.
            items = list(_items_of(container))
            stack.append((container, items))
            stack += [(item, None) for item in items]


def _items_of(container: Any) -> Iterable[Any]:
    """Return what a container contains, without code of its class."""
    if isinstance(container, dict):
        return (*dict.keys(container), *dict.values(container))
    if isinstance(container, ForeignObject):
        return (*container.args, container.state, *(part for pair in container.items for part in pair))
    if isinstance(container, ForeignShardedTensor):
        return (container.state,)
    if isinstance(container, argparse.Namespace | types.SimpleNamespace):
        return vars(container).values()
    base: Any = next(cls for cls in _SEQUENCES if isinstance(container, cls))
    items: Iterable[Any] = base.__iter__(container)
    return items
