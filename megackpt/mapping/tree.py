"""Nested dicts and lists of a state dict, walked with the path of every leaf.

Owns walking, mapping, splitting and merging. Paths look as one would write them, `optimizer.groups[0].lr`,
and stand in every error that concerns a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megackpt.errors import DeclarationError

ABSENT = object()
"""What a mapping function returns to leave a leaf out."""


def iter_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)`, dicts and lists in order. Anything but a dict or a list is a leaf."""
    for step, child in _children(tree, path):
        if isinstance(child, (dict, list)):
            yield from iter_leaves(child, step)
        else:
            yield step, child


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Return a new tree with `fn(path, leaf)` in place of each leaf; the given one is not changed.

    A dict loses the leaves for which fn returns ABSENT. A list that loses any becomes a dict of what is
    left, keyed by position, so that `merge` can put the others back in their places.
    """
    if not isinstance(tree, (dict, list)):
        return fn(path, tree)
    mapped = {}
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key, (step, child) in zip(keys, _children(tree, path), strict=True):
        value = map_leaves(fn, child, step)
        if value is not ABSENT:
            mapped[key] = value
    if isinstance(tree, list) and len(mapped) == len(tree):
        return list(mapped.values())
    return mapped


def merge(base: Any, other: Any, path: str = "") -> Any:
    """Return the union of two trees split by `map_leaves`; where both have a leaf, `other`'s stands.

    Raises:
        DeclarationError: one has a leaf where the other has a dict or list.
    """
    if isinstance(base, (dict, list)) and isinstance(other, (dict, list)):
        return _merge_containers(base, other, path)
    if isinstance(base, (dict, list)) or isinstance(other, (dict, list)):
        raise DeclarationError(
            f"The state dict and the checkpoint differ in structure at {path or 'the top'!r}: one has "
            f"{type(base).__name__}, the other {type(other).__name__}. Ask for the structure that was saved.",
            path=path,
        )
    return other


def join(path: str, key: object) -> str:
    """Append a dict key (or, an int, a list index) to a path.

    >>> join("model", "weight"), join("groups", 0), join("", "a")
    ('model.weight', 'groups[0]', 'a')
    """
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _children(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        yield join(path, key), child


def _merge_containers(base: dict[Any, Any] | list[Any], other: dict[Any, Any] | list[Any], path: str) -> Any:
    left = base if isinstance(base, dict) else dict(enumerate(base))
    right = other if isinstance(other, dict) else dict(enumerate(other))
    merged = dict(left)
    for key, value in right.items():
        merged[key] = merge(left[key], value, join(path, key)) if key in left else value
    if isinstance(base, list) or isinstance(other, list):
        if sorted(merged, key=repr) != sorted(range(len(merged)), key=repr):
            raise DeclarationError(
                f"The list at {path!r} has positions {sorted(merged, key=repr)}, which is not a whole list. "
                f"The checkpoint holds another number of elements than the state dict asks for.",
                path=path,
            )
        return [merged[i] for i in range(len(merged))]
    return merged
