"""Nested dicts and lists. Source: Megatron-Core `dist_checkpointing.dict_utils`, for names and behaviour.

Anything but a dict or a list is a leaf, tuples too. Our own core works on `megackpt.entities.tree` instead,
which names the path of a leaf in its errors and changes nothing in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from megackpt.errors import DeclarationError

U = TypeVar("U")
V = TypeVar("V")

Container = dict[Any, Any] | list[Any]
_SHOWN = 30


def extract_matching_values(
    x: Container, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Return the leaves that satisfy the predicate, and the others, each in the structure of x.

    With return_lists_as_dicts a list comes back as a dict by position, so that the two can be put together
    again. Empty containers of a dict are among the others.

    Raises:
        DeclarationError: x is neither a dict nor a list.
    """
    if not isinstance(x, (dict, list)):
        raise DeclarationError(
            f"A dict or a list is expected at the top, not {type(x).__name__}. Give a state dict."
        )
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in _items(x):
        if isinstance(value, (dict, list)) and value:
            inside, outside = extract_matching_values(value, predicate, return_lists_as_dicts)
            matching.update({key: inside} if inside else {})
            others.update({key: outside} if outside else {})
        else:
            empty_in_dict = isinstance(x, dict) and isinstance(value, (dict, list))
            target = matching if not empty_in_dict and predicate(value) else others
            target[key] = value
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(matching.values()), list(others.values())
    return matching, others


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the paths that only x1 has, those that only x2 has, and those where values differ.

    A path is a tuple of keys and positions; a difference is `(path, type in x1, type in x2)`. Tensors are
    equal if all their elements are.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left, right = x1, x2
    elif isinstance(x1, (list, tuple)) and isinstance(x2, (list, tuple)):
        left, right = dict(enumerate(x1)), dict(enumerate(x2))
    elif hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    else:
        return [], [], [] if _equal(x1, x2) else [(prefix, type(x1), type(x2))]
    only_left = [(*prefix, key) for key in left if key not in right]
    only_right = [(*prefix, key) for key in right if key not in left]
    mismatch: list[Any] = []
    for key in (key for key in left if key in right):
        inner = diff(left[key], right[key], (*prefix, key))
        only_left += inner[0]
        only_right += inner[1]
        mismatch += inner[2]
    return only_left, only_right, mismatch


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    """Print the types of all leaves as an indented tree."""
    if isinstance(x, (dict, list)):
        print()  # noqa: T201 - printing is what it is for
        for key, value in _items(x):
            mark = f"> {key}: " if isinstance(x, dict) else f"- {key}: "
            print(" " * indent * len(prefix) + mark, end="")  # noqa: T201
            inspect_types(value, (*prefix, key), indent)
    elif isinstance(x, torch.Tensor):
        print(f"Tensor of shape {tuple(x.shape)}")  # noqa: T201
    else:
        text = str(x)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (truncated)"
        print(f"[{type(x)}]: {shown}")  # noqa: T201


def nested_values(x: Container) -> Iterator[Any]:
    """Yield every leaf, in order."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Container) -> Iterator[tuple[Any, Any, Any]]:
    """Yield `(container, key or position, leaf)` for every leaf, in order."""
    for key, value in _items(x):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf by `f(leaf)`, in place."""
    dict_map_with_key(lambda _, value: f(value), d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf by `f(key or position, leaf)`, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by `f(leaf)`, in place, and return x; `f(x)` if x is a leaf itself."""
    if not isinstance(x, (dict, list)):
        return f(x)
    for key, value in _items(x):
        x[key] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return the structure with every leaf replaced by `f(leaf)`; x is not changed."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: tuple[str | int, ...] = ()) -> Any:
    """Put what x2 has into x1, in place, and return it.

    Raises:
        DeclarationError: both have a leaf at one path, or lists of different length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise DeclarationError(f"At {key}: lists of {len(x1)} and {len(x2)} elements cannot be merged.")
        x1[:] = [merge(*pair, (*key, i)) for i, pair in enumerate(zip(x1, x2, strict=True))]
    else:
        raise DeclarationError(
            f"At {key}: both have a value, of types {type(x1).__name__} and {type(x2).__name__}. Merge dicts "
            f"whose leaves stand at different paths."
        )
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[Any], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Group `value_fn(x)` by `key_fn(x)`, in order; return `reduce_fn` of each group's list, by key."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def _items(x: Container) -> list[tuple[Any, Any]]:
    """Children by key or position, as they are now: the container may change meanwhile."""
    return list(x.items()) if isinstance(x, dict) else list(enumerate(x))


def _equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return x1.shape == x2.shape and bool(torch.all(x1.cpu() == x2.cpu()))
    if isinstance(x1, np.ndarray) or isinstance(x2, np.ndarray):
        return np.array_equal(x1, x2)
    return bool(x1 == x2)
