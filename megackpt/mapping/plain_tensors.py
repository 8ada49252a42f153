"""Plain tensors of a state dict: which they are, and which stored value or array fills each at a load.

A plain tensor is saved as common state, or as an array (`plain_tensors="arrays"`). A checkpoint of the same
model may hold it either way, so a load looks for both.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from megackpt.mapping.recognition import is_torch_sharded, xla_tensor_of
from megackpt.mapping.sharded_tensor import ShardedTensor
from megackpt.mapping.tree import (
    PathKeys,
    Steps,
    add_step,
    dotted,
    iter_leaves,
    leaf_types,
    map_leaves,
    same_name_error,
)


def is_plain_tensor(leaf: object) -> bool:
    """Say whether a leaf is an ordinary strided tensor: all of its elements are here, in its own storage.

    Parameters and subclasses are, but for those that hold other tensors or have no storage yet.
    """
    return (
        isinstance(leaf, torch.Tensor)
        and not is_torch_sharded(leaf)
        and not isinstance(leaf, UninitializedTensorMixin)
        and leaf.layout == torch.strided
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and xla_tensor_of(leaf) is None
    )


def has_tensors(kinds: Iterable[type]) -> bool:
    """Say whether there may be plain tensors among leaves of these classes."""
    return any(issubclass(kind, torch.Tensor) for kind in kinds)


def plain_tensors(state: Any) -> dict[Steps, torch.Tensor]:
    """Return the plain tensors of a tree by the steps that lead to them."""
    if not has_tensors(leaf_types(state)):  # as a rule: to list all steps takes much longer
        return {}
    return {steps: leaf for steps, leaf in iter_leaves(state, (), step=add_step) if is_plain_tensor(leaf)}


def match_common_leaves(
    wanted: Iterable[Steps], stored: Iterable[Steps], arrays: Container[str] = ()
) -> dict[Steps, Steps]:
    """Return which leaf of stored common state answers each plain tensor, by the steps to both. Pure.

    A leaf at the same steps answers. Where there is none, a leaf whose steps give the same text when joined
    with dots does, so that nested and flattened optimizer state dicts load each other. An array of that
    name comes before it.

    Raises:
        DeclarationError: several tensors, or several leaves, have the name, so that it does not tell which
            is meant.
    """
    leaves = set(stored)
    found = {steps: steps for steps in wanted if steps in leaves}
    others: dict[str, list[Steps]] = {}
    for steps in wanted:
        if steps not in found and (name := dotted(steps)) not in arrays:
            others.setdefault(name, []).append(steps)
    if not others:
        return found
    named: dict[str, list[Steps]] = {}
    for steps in leaves:
        named.setdefault(dotted(steps), []).append(steps)
    exact: dict[str, list[Steps]] = {}
    for steps in found:
        exact.setdefault(dotted(steps), []).append(steps)
    for name, asking in others.items():
        answers = named.get(name, [])
        if not answers:
            continue
        if len(asking) + len(exact.get(name, [])) > 1:
            raise same_name_error(name, [*asking, *exact.get(name, [])], "tensors of the state dict")
        if len(answers) > 1:
            raise same_name_error(name, answers, "values of the checkpoint")
        found[asking[0]] = answers[0]
    return found


def fill_in_place(stored: Any, targets: Mapping[Steps, torch.Tensor]) -> Any:
    """Return stored common state with what stands in targets, by steps, in place of equal-looking tensors.

    Each of these is filled with the stored values. One of another shape or dtype, without memory, or whose
    elements share memory is left alone, and the stored tensor stays.
    """

    def filled(steps: Steps, leaf: Any) -> Any:
        target = targets.get(steps)
        if target is None or not is_plain_tensor(leaf) or not can_be_filled(target, leaf):
            return leaf
        with torch.no_grad():
            target.detach().copy_(leaf)
        return target

    return map_leaves(filled, stored, (), step=add_step) if targets else stored


def can_be_filled(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether a tensor can be filled in place with values of this shape and dtype."""
    shares_memory = any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True))
    return (
        target.shape == value.shape
        and target.dtype == value.dtype
        and target.device.type != "meta"
        and not shares_memory
    )


def declare_whole_tensors(
    state: Any, keys: Container[str], *, common: Container[Steps] = (), names: PathKeys | None = None
) -> Any:
    """Return the tree with every plain tensor whose path, joined with dots, is one of keys as a whole array.

    What was saved from DTensors under these paths is thereby loaded into a model without any. Tensors at
    steps in common stay what they are. names has the keys that other leaves have of their paths. The given
    tree is not changed.

    Raises:
        DeclarationError: two leaves get one key.
    """
    taken = PathKeys() if names is None else names

    def declared(steps: Steps, leaf: Any) -> Any:
        if not is_plain_tensor(leaf) or steps in common or dotted(steps) not in keys:
            return leaf
        shape = tuple(leaf.shape)
        return ShardedTensor(taken.key_of(steps), leaf, leaf.dtype, shape, shape, (0,) * len(shape))

    return map_leaves(declared, state, (), step=add_step) if keys else state
