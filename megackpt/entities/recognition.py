"""Entities and tensors of other libraries, recognised by their classes without importing these libraries.

A library that is not loaded has no instances. An adapter turns a leaf of another library into an entity of
ours. Each adapter is imported only where a state dict holds a leaf of its library: `torch_sharded`, `xla`,
`megatron_entities`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from megackpt.entities.tree import PathKeys, Steps

MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
"""The module of Megatron-Core that defines its sharded entities."""

XLA_CLASS = "XLAShardedTensor"
XLA_PACKAGE = "torch_xla"


Adapter: TypeAlias = "Callable[[Steps, Any, PathKeys], Any]"
"""Takes the steps of a leaf, the leaf, and what names leaves without a key; returns the entity that declares
it, or the leaf itself if it declares nothing."""


def adapter_of(kind: type) -> Adapter | None:
    """Return the adapter for leaves of a class; None if its library has no adapter."""
    # XLA before DTensor: from torch_xla 2.9 on its tensors are of a class that is derived from DTensor.
    is_loaded = f"{XLA_PACKAGE}.distributed.spmd" in sys.modules
    if is_xla_class(kind) or (is_loaded and issubclass(kind, torch.Tensor)):
        from megackpt.entities.xla import adopt_xla_tensor

        return adopt_xla_tensor
    if is_torch_sharded_class(kind):
        from megackpt.entities.torch_sharded import adopt_torch_sharded_tensor

        return adopt_torch_sharded_tensor
    return megatron_adapter_of(kind)


def megatron_adapter_of(kind: type) -> Adapter | None:
    """Return what turns leaves of a class of Megatron-Core into entities; None for other classes."""
    if all(cls.__module__ != MEGATRON_MODULE for cls in kind.__mro__):
        return None
    from megackpt.entities.megatron_entities import adopt_megatron_entity

    return adopt_megatron_entity


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor of torch, without importing its module."""
    return is_dtensor_class(type(value))


def is_dtensor_class(kind: type) -> bool:
    """Return whether a class is DTensor of torch or derives from it."""
    cls: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return issubclass(kind, cls)


def is_torch_sharded(value: object) -> bool:
    """Return whether a value is a tensor that torch shards over ranks: a DTensor or a ShardedTensor."""
    return is_torch_sharded_class(type(value))


def is_torch_sharded_class(kind: type) -> bool:
    """Return whether a class is DTensor or ShardedTensor of torch or derives from one of them."""
    return is_dtensor_class(kind) or is_sharded_tensor_class(kind)


def is_sharded_tensor_class(kind: type) -> bool:
    """Return whether a class is ShardedTensor of torch, as of FSDP version 1, or derives from it."""
    cls: Any = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor.api"), "ShardedTensor", ())
    return issubclass(kind, cls)


def xla_tensor_of(leaf: Any) -> Any:
    """Return the XLAShardedTensor of a leaf: itself, or the wrapper of a tensor marked as sharded; else None.

    `mark_sharding` does not change the class of parameters, so the state dict of a model has plain tensors,
    which torch_xla wraps on demand.
    """
    if is_xla_class(type(leaf)):
        return leaf
    # torch warns at every attribute of its ShardedTensor, so the class is checked before the device.
    if not isinstance(leaf, torch.Tensor) or is_sharded_tensor_class(type(leaf)):
        return None
    if leaf.device.type == "xla":
        spmd = sys.modules.get(f"{XLA_PACKAGE}.distributed.spmd")
        wrapped = leaf if spmd is None else spmd.wrap_if_sharded(leaf)
        return None if wrapped is leaf else wrapped
    return None


def is_xla_class(kind: type) -> bool:
    """Return whether a class is XLAShardedTensor of torch_xla or derives from it."""
    return any(
        cls.__name__ == XLA_CLASS and cls.__module__.split(".")[0] == XLA_PACKAGE for cls in kind.__mro__
    )
