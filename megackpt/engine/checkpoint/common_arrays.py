"""Tensors of common state that are stored as global arrays, so that all ranks write and read them.

A save takes them out of common state and leaves a reference, `ArrayReference`, at the place of each. A load
puts the tensors back. Formats that hold common state as other programs read it keep it whole.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from megackpt.codec import ArrayReference
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import dtype_name
from megackpt.mapping.plain_tensors import is_plain_tensor
from megackpt.mapping.tree import ABSENT, Steps, dotted
from megackpt.metadata import DTYPES


def find_arrays(common: Any, taken: Container[str]) -> dict[Steps, ShardedTensor]:
    """Return the tensors of common state that can be global arrays, as whole ones; taken keys are left out.

    The key is the path joined with dots. A tensor stays common state if it has no dims or no elements, if
    another has the same key, or if common state would refuse it or not give it back as it is.
    """
    found = {
        steps: leaf
        for steps, leaf in _leaves(common, ())
        if isinstance(leaf, torch.Tensor) and _can_be_array(leaf) and _is_name(steps)
    }
    names = Counter(map(dotted, found))
    arrays = {}
    for steps, leaf in found.items():
        key, shape = dotted(steps), tuple(leaf.shape)
        if names[key] == 1 and key not in taken:
            arrays[steps] = ShardedTensor(key, leaf, leaf.dtype, shape, shape, (0,) * len(shape))
    return arrays


def with_references(common: Any, arrays: Mapping[Steps, ShardedTensor]) -> Any:
    """Return common state with a reference in the place of each of these tensors."""

    def referred(steps: Steps, leaf: Any) -> Any:
        array = arrays.get(steps)
        return leaf if array is None else ArrayReference(array.key)

    return map_common(referred, common) if arrays else common


def array_references(common: Any) -> dict[Steps, str]:
    """Return the keys of the arrays that stored common state refers to, by their places."""
    return {steps: leaf.key for steps, leaf in _leaves(common, ()) if isinstance(leaf, ArrayReference)}


def value_steps(common: Any) -> set[Steps]:
    """Return the places of stored common state that hold a value, and no reference to an array."""
    return {steps for steps, leaf in _leaves(common, ()) if not isinstance(leaf, ArrayReference)}


def with_tensors(common: Any, tensors: Mapping[Steps, Any]) -> Any:
    """Return stored common state with tensors in the place of references; those without one are left out."""

    def resolved(steps: Steps, leaf: Any) -> Any:
        return tensors.get(steps, ABSENT) if isinstance(leaf, ArrayReference) else leaf

    result = map_common(resolved, common)
    return {} if result is ABSENT else result


def map_common(fn: Callable[[Steps, Any], Any], tree: Any, steps: Steps = ()) -> Any:
    """Like `map_leaves`, by steps, and an OrderedDict stays one. A list that loses leaves becomes a dict.

    Containers of other classes, also derived ones, are leaves.
    """
    if type(tree) not in _CONTAINERS:
        return fn(steps, tree)
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    values = {key: map_common(fn, child, (*steps, key)) for key, child in children}
    kept = {key: value for key, value in values.items() if value is not ABSENT}
    if values and not kept:
        return ABSENT
    if isinstance(tree, list):
        return list(kept.values()) if len(kept) == len(tree) else kept
    if all(kept.get(key, ABSENT) is child for key, child in tree.items()):
        return tree
    return OrderedDict(kept) if isinstance(tree, OrderedDict) else kept


_CONTAINERS = (dict, OrderedDict, list)


def _leaves(tree: Any, steps: Steps) -> Iterator[tuple[Steps, Any]]:
    """Yield the places and values that `map_common` maps."""
    if type(tree) not in _CONTAINERS:
        yield steps, tree
        return
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(child, (*steps, key))


def _is_name(steps: Steps) -> bool:
    """Say whether steps joined with dots are a key: text that can be stored."""
    try:
        return all(type(step) in (str, int) for step in steps) and bool(dotted(steps).encode())
    except UnicodeEncodeError:
        return False


def _can_be_array(leaf: torch.Tensor) -> bool:
    return (
        type(leaf) is torch.Tensor
        and is_plain_tensor(leaf)
        and leaf.dim() > 0
        and leaf.numel() > 0
        and not leaf.requires_grad
        and not leaf.is_meta
        and not leaf.is_quantized
        and dtype_name(leaf.dtype) in DTYPES
        and not any(n > 1 and stride == 0 for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
    )
