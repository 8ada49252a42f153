"""Plain tensors of a state dict: which they are, and which stored value or array fills each at a load.

A plain tensor is saved as common state, or as an array (`plain_tensors="arrays"`). A checkpoint of the same
model may hold it either way, so a load looks for both.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from megackpt.entities.base import MAX_DIMS
from megackpt.entities.describe import dtype_name
from megackpt.entities.recognition import is_torch_sharded, xla_tensor_of
from megackpt.entities.sharded_tensor import ShardedTensor
from megackpt.entities.tree import Steps, add_step, dotted, iter_leaves, same_name_error
from megackpt.plans.metadata import DTYPES


def is_plain_tensor(leaf: object) -> bool:
    """Return whether a leaf is an ordinary strided tensor, with all of its elements in its own storage.

    Parameters and subclasses are plain tensors, except those that wrap other tensors or have no storage yet.
    """
    return (
        isinstance(leaf, torch.Tensor)
        and not is_torch_sharded(leaf)
        and not isinstance(leaf, UninitializedTensorMixin)
        and leaf.layout == torch.strided
        and not leaf.is_nested
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and xla_tensor_of(leaf) is None
    )


def is_dense(leaf: Any) -> bool:
    """Return whether a leaf is a plain tensor that has all of its elements in memory, in a stored dtype."""
    return (
        is_plain_tensor(leaf)
        and not leaf.is_meta
        and not leaf.is_quantized
        and dtype_name(leaf.dtype) in DTYPES
    )


def can_be_array(leaf: object) -> bool:
    """Return whether a tensor of common state can be stored as an array, and loaded again as it is.

    Elements that share memory become elements of their own. A tensor without dims or elements takes less
    room in common state, and is an array to a load all the same.
    """
    return (
        type(leaf) is torch.Tensor
        and is_dense(leaf)
        and 0 < leaf.dim() <= MAX_DIMS
        and leaf.numel() > 0
        and not leaf.requires_grad
    )


def plain_tensors(state: Any) -> dict[Steps, torch.Tensor]:
    """Return the plain tensors of a tree by the steps that lead to them."""
    return {steps: leaf for steps, leaf in iter_leaves(state, (), step=add_step) if is_plain_tensor(leaf)}


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_VERSION_WITH_STATISTICS = 2  # of the norms of torch that have all three


def module_statistics(state: Any) -> set[Steps]:
    """Return the steps to the running statistics of norms, in each `module.state_dict()` of a tree.

    Tensors of a state dict do not show whether they are parameters or buffers. These are buffers by the class
    that a module's metadata in the state dict stands for.

    Source: `torch.nn.modules.batchnorm._NormBase`; `_metadata` is that of `torch.nn.Module.state_dict`.
    """
    statistics: set[Steps] = set()
    for steps, metadata in _module_metadata(state, ()):
        for module, entry in metadata.items():
            version = entry.get("version") if isinstance(entry, Mapping) else None
            if version == _VERSION_WITH_STATISTICS:
                prefix = f"{module}." if module else ""
                statistics |= {(*steps, f"{prefix}{name}") for name in _STATISTICS}
    return statistics


def _module_metadata(tree: Any, steps: Steps) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield the steps to each state dict of a module, with its metadata."""
    metadata = getattr(tree, "_metadata", None)
    if isinstance(tree, dict) and isinstance(metadata, Mapping):
        yield steps, metadata
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    for key, child in children:
        yield from _module_metadata(child, (*steps, key))


def match_common_leaves(
    wanted: Iterable[Steps], stored: Iterable[Steps], arrays: Container[str] = ()
) -> dict[Steps, Steps]:
    """Return the leaf of stored common state from which each plain tensor is loaded, by steps. Pure.

    It is the leaf at the same steps. If there is none, it is a leaf whose steps give the same text when
    joined with dots, so that nested and flattened optimizer state dicts load each other; unless there is an
    array of that name.

    Args:
        wanted: the steps to the plain tensors of the request.
        stored: the steps to the leaves of stored common state.
        arrays: the keys of stored arrays.

    Raises:
        DeclarationError: a name belongs to several tensors or several leaves.
    """
    leaves = set(stored)
    matches = {steps: steps for steps in wanted if steps in leaves}
    unmatched: dict[str, list[Steps]] = {}
    for steps in wanted:
        if steps not in matches and (name := dotted(steps)) not in arrays:
            unmatched.setdefault(name, []).append(steps)
    if not unmatched:
        return matches
    leaves_of_name: dict[str, list[Steps]] = {}
    for steps in leaves:
        leaves_of_name.setdefault(dotted(steps), []).append(steps)
    exact: dict[str, list[Steps]] = {}
    for steps in matches:
        exact.setdefault(dotted(steps), []).append(steps)
    for name, asking in unmatched.items():
        answers = leaves_of_name.get(name, [])
        if not answers:
            continue
        if len(asking) + len(exact.get(name, [])) > 1:
            raise same_name_error(name, [*asking, *exact.get(name, [])], "tensors of the state dict")
        if len(answers) > 1:
            raise same_name_error(name, answers, "values of the checkpoint")
        matches[asking[0]] = answers[0]
    return matches


def can_be_filled(target: torch.Tensor, *, load_on_device: bool) -> bool:
    """Return whether a load fills a plain tensor in place; otherwise it returns a new one instead.

    It does not fill tensors without memory, those whose elements share memory, and those on devices if they
    are to be loaded into host memory.
    """
    shares_memory = any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True))
    is_in_reach = load_on_device or target.device.type == "cpu"
    return is_in_reach and target.device.type != "meta" and not shares_memory


def declare_whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """Declare a plain tensor as a whole array, so that what was saved from DTensors loads without them."""
    shape = tuple(tensor.shape)
    return ShardedTensor(key, tensor, tensor.dtype, shape, shape, (0,) * len(shape))
