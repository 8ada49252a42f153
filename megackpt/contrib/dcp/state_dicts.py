"""State dicts as DCP has them: names of leaves, rectangles of arrays, copies for background saves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint import staging

from megackpt.entities import ShardedTensor
from megackpt.errors import DeclarationError
from megackpt.plans.geometry import Box, rectangles_of

# Nested state dicts as DCP names their leaves, and back.
#
# A name is the steps to a leaf, joined with dots. A dict is always walked. A list is walked only if it
# contains a dict or a tensor; otherwise it is one value.
#
# Source: torch.distributed.checkpoint's flatten_state_dict (torch 2.4 and later).

Steps: TypeAlias = tuple[Any, ...]
"""The dict keys and list indices that lead to a leaf."""


def flatten(tree: Any) -> dict[str, tuple[Steps, Any]]:
    """Return steps and value of every leaf of nested dicts and lists, by name.

    >>> {name: value for name, (_, value) in flatten({"a": [1, 2], "b": [{"c": 3}]}).items()}
    {'a': [1, 2], 'b.0.c': 3}

    Raises:
        DeclarationError: two leaves have one name.
    """
    leaves: dict[str, tuple[Steps, Any]] = {}
    for steps, value in _leaves(tree, ()):
        name = name_of(steps)
        if name in leaves:
            raise DeclarationError(
                f"{name!r}: two leaves of the state dict have this name, which is a path joined with dots. "
                f"Rename one of the dict keys on the way to them.",
                key=name,
            )
        leaves[name] = (steps, value)
    return leaves


def name_of(steps: Steps) -> str:
    """Return the name of the leaf at these steps."""
    return ".".join(map(str, steps))


def replace_leaves(tree: Any, values: Mapping[str, Any], steps: Steps = ()) -> Any:
    """Return the tree with other values for the leaves that are named; the given one is not changed."""
    if not is_walked(tree):
        return values.get(name_of(steps), tree)
    replaced = {key: replace_leaves(child, values, (*steps, key)) for key, child in _children(tree).items()}
    return replaced if isinstance(tree, Mapping) else list(replaced.values())


def with_value(tree: Any, steps: Steps, value: Any) -> Any:
    """Return nested dicts and lists with one more value; a list that gets one becomes a dict by position."""
    if not steps:
        return value
    children = _children(tree)
    children[steps[0]] = with_value(children.get(steps[0], {}), steps[1:], value)
    return children


def with_lists(tree: Any) -> Any:
    """Return the tree with a list for each dict whose keys are 0, 1, 2, ... in any order."""
    if not isinstance(tree, dict):
        return tree
    made = {key: with_lists(child) for key, child in tree.items()}
    is_list = bool(made) and all(type(key) is int for key in made) and sorted(made) == list(range(len(made)))
    return [made[i] for i in range(len(made))] if is_list else made


def update(target: Any, loaded: Any) -> None:
    """Write the leaves of a loaded tree into a state dict of the same structure, in place."""
    for key, value in _children(loaded).items():
        known = isinstance(target, list) or key in target
        present = target[key] if known else None
        same_kind = isinstance(present, Mapping) and isinstance(value, Mapping)
        same_kind |= isinstance(present, list) and isinstance(value, list) and len(present) == len(value)
        if same_kind and present:
            update(present, value)
        elif present is not value:
            target[key] = value


def is_walked(value: Any) -> bool:
    """Return whether a value is a branch of a state dict, not a leaf."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(v, torch.Tensor) or is_walked(v) for v in value)


def _children(tree: Any) -> dict[Any, Any]:
    return dict(tree) if isinstance(tree, Mapping) else dict(enumerate(tree))


def _leaves(tree: Any, steps: Steps) -> list[tuple[Steps, Any]]:
    if not is_walked(tree):
        return [(steps, tree)]
    return [leaf for key, child in _children(tree).items() for leaf in _leaves(child, (*steps, key))]


# Entities as DCP knows chunks: rectangles of the global array, each with a view of its elements.
#
# DCP knows neither flat shards nor prepended axes, so they are cut into such rectangles here.


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """A part of what an entity holds.

    Attributes:
        box: where it lies in the global array.
        data: its elements, a view of the entity's, of the box's shape; None without data.
    """

    box: Box
    data: torch.Tensor | None


def rectangles(tensor: ShardedTensor) -> list[Rectangle]:
    """Return the rectangles of an entity; a block without elements is one, an empty flat range none."""
    data = None if tensor.data is None else tensor.data.detach()
    flat = tensor.flattened_range
    if flat is None or not tensor.box_shape:
        whole = None if data is None else data[(None,) * tensor.prepend_axis_num]
        return [Rectangle(Box(tensor.global_offset, tensor.box_shape), whole)]
    cut = rectangles_of(np.array([tensor.box_shape]), np.array([flat.start]), np.array([flat.stop]))
    rectangles = []
    position = 0
    for start, extents in zip(cut.start.tolist(), cut.shape.tolist(), strict=True):
        offset = tuple(a + b for a, b in zip(tensor.global_offset, start, strict=True))
        box = Box(offset, tuple(extents))
        present = None if data is None else data[position : position + box.numel].view(box.shape)
        rectangles.append(Rectangle(box, present))
        position += box.numel
    return rectangles


# The copy that a save in the background takes of a state dict, for torch releases that take none.
#
# A workaround: before DCP had stagers, its async_save copied tensors of devices only, and shared tensors in
# host memory with the training.

if hasattr(staging, "DefaultStager"):  # DCP copies everything itself

    class Stager:
        """Nothing: DCP takes the copy."""

else:
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    class Stager(staging.BlockingAsyncStager):  # type: ignore[no-redef]
        """Takes the copy when async_save asks the storage writer for it."""

        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Return the state dict in host memory of its own. Local."""
            return copy.deepcopy(_offload_state_dict_to_cpu(state_dict, type_check=False))
