"""Tensors of common state that are stored as global arrays, so that all ranks write and read them.

A save replaces each of them in common state by an `ArrayReference`, and a load puts the tensors back.
Formats that store common state in a form that other programs read do not do this.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from megackpt.codec import ArrayReference
from megackpt.codec.kinds import format_path
from megackpt.entities import ShardedTensor
from megackpt.entities.plain_tensors import can_be_array, declare_whole
from megackpt.entities.tree import ABSENT, Steps, dotted


def find_arrays(common: Any, taken: Container[str]) -> dict[Steps, ShardedTensor]:
    """Declare the tensors of common state that can be stored as global arrays, by their steps.

    The key of each is its path joined with dots. A tensor stays in common state if it has no dims or no
    elements, if another one has the same key, or if it could not be loaded again as it is.

    Args:
        common: common state.
        taken: keys of other entities, which are not used again.
    """
    candidates = {
        steps: leaf for steps, leaf in common_leaves(common) if can_be_array(leaf) and is_name(steps)
    }
    counts = Counter(map(dotted, candidates))
    arrays = {}
    for steps, leaf in candidates.items():
        key = dotted(steps)
        # The path ('a', 'b') and the name 'a.b' give one key. Then none of them becomes an array.
        if counts[key] == 1 and key not in taken:
            arrays[steps] = declare_whole(key, leaf)
    return arrays


def with_references(common: Any, keys: Mapping[Steps, str]) -> Any:
    """Return common state with a reference to an array, by its key, in the place of each of these tensors."""

    def reference_or_leaf(steps: Steps, leaf: Any) -> Any:
        return ArrayReference(keys[steps]) if steps in keys else leaf

    return map_common(reference_or_leaf, common) if keys else common


def array_references(common: Any) -> dict[Steps, str]:
    """Return the keys of the arrays that stored common state refers to, by the steps of the references."""
    return {steps: leaf.key for steps, leaf in common_leaves(common) if isinstance(leaf, ArrayReference)}


def value_steps(common: Any) -> set[Steps]:
    """Return the steps to the leaves of stored common state that are no references to arrays."""
    return {steps for steps, leaf in common_leaves(common) if not isinstance(leaf, ArrayReference)}


def with_tensors(common: Any, tensors: Mapping[Steps, Any]) -> Any:
    """Return stored common state with references replaced by tensors; other references are left out."""

    def tensor_or_leaf(steps: Steps, leaf: Any) -> Any:
        return tensors.get(steps, ABSENT) if isinstance(leaf, ArrayReference) else leaf

    result = map_common(tensor_or_leaf, common)
    return {} if result is ABSENT else result


def map_common(fn: Callable[[Steps, Any], Any], tree: Any, steps: Steps = ()) -> Any:
    """Return a tree of common state with each leaf replaced by `fn(steps, leaf)`; ABSENT removes the leaf.

    It differs from `map_leaves` in that an OrderedDict stays an OrderedDict, and a list that loses leaves
    becomes a dict by position. Containers of other classes, derived classes included, are leaves.
    """
    if type(tree) not in _CONTAINERS:
        return fn(steps, tree)
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    values = {key: map_common(fn, child, (*steps, key)) for key, child in children}
    kept = {key: value for key, value in values.items() if value is not ABSENT}
    # A container that loses all of its leaves goes with them. One that was empty before stays.
    if values and not kept:
        return ABSENT
    if isinstance(tree, list):
        return list(kept.values()) if len(kept) == len(tree) else kept
    # Most dicts have no array in them, and need no copy.
    if all(kept.get(key, ABSENT) is child for key, child in tree.items()):
        return tree
    return OrderedDict(kept) if isinstance(tree, OrderedDict) else kept


_CONTAINERS = (dict, OrderedDict, list)


def common_leaves(tree: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Yield steps and values of the leaves that `map_common` visits."""
    if type(tree) not in _CONTAINERS:
        yield steps, tree
        return
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from common_leaves(child, (*steps, key))


def is_name(steps: Steps) -> bool:
    """Return whether steps joined with dots are a key that can be stored as text."""
    try:
        return all(type(step) in (str, int) for step in steps) and bool(dotted(steps).encode())
    except UnicodeEncodeError:
        return False


def parents_of_parts(common: Any) -> dict[str, str]:
    """Return the paths of the parts of common state, each with the path around it. Local."""
    return {path: format_path("", steps[:-1]) for path, steps, _ in common_parts(common)}


def common_parts(common: Any) -> Iterator[tuple[str, Steps, dict[Any, Any]]]:
    """Yield path, steps and content of each dict inside of common state that holds something, but no array.

    Rank 0 declares all arrays of common state, so a part with one of them cannot be on other ranks only.
    """
    waiting: list[tuple[Steps, Any]] = [((), common)]
    while waiting:
        steps, tree = waiting.pop()
        if not isinstance(tree, dict):
            continue
        leaves = [leaf for _, leaf in common_leaves(tree)]
        if steps and leaves and not any(isinstance(leaf, ArrayReference) for leaf in leaves):
            yield format_path("", steps), steps, tree
        waiting += [((*steps, key), child) for key, child in tree.items()]
