"""Entities and tensors of other libraries, recognised by their classes without importing these libraries.

A library that is not loaded has no instances. An adapter (in `torch_sharded`, `xla`, `megatron_entities`)
turns a leaf of such a class into an entity. It is imported only where a state dict holds one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from megackpt.entities.tree import PathKeys, Steps

Adapter: TypeAlias = Callable[[Steps, Any, PathKeys], Any]
"""Takes the steps of a leaf, the leaf, and what names leaves without a key; returns the entity that declares
it, or the leaf itself if it declares nothing."""

MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
"""The module of Megatron-Core that defines its sharded entities."""

XLA_CLASS = "XLAShardedTensor"
XLA_PACKAGE = "torch_xla"


def is_megatron_class(kind: type) -> bool:
    """Return whether a class is a sharded entity of Megatron-Core or derives from one."""
    return any(cls.__module__ == MEGATRON_MODULE for cls in kind.__mro__)


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


def adapter_of(kind: type) -> Adapter | None:
    """Return what turns leaves of a class into entities; None for a class that is no other library's."""
    # XLA before DTensor: from torch_xla 2.9 on its tensors are of a class that is derived from DTensor.
    is_loaded = f"{XLA_PACKAGE}.distributed.spmd" in sys.modules
    if _is_xla_class(kind) or (is_loaded and issubclass(kind, torch.Tensor)):
        from megackpt.entities.xla import adopt_xla_tensor

        return adopt_xla_tensor
    if is_torch_sharded_class(kind):
        from megackpt.entities.torch_sharded import adopt_torch_sharded_tensor

        return adopt_torch_sharded_tensor
    return megatron_adapter_of(kind)


def megatron_adapter_of(kind: type) -> Adapter | None:
    """Return what turns leaves of a class of Megatron-Core into entities; None for other classes."""
    if not is_megatron_class(kind):
        return None
    from megackpt.entities.megatron_entities import adopt_megatron_entity

    return adopt_megatron_entity


def xla_tensor_of(leaf: Any) -> Any:
    """Return the XLAShardedTensor of a leaf: itself, or the wrapper of a tensor marked as sharded; else None.

    `mark_sharding` does not change the class of parameters, so the state dict of a model has plain tensors,
    which torch_xla wraps on demand.
    """
    if _is_xla_class(type(leaf)):
        return leaf
    # torch warns at every attribute of its ShardedTensor, so the class is checked before the device.
    if not isinstance(leaf, torch.Tensor) or is_sharded_tensor_class(type(leaf)):
        return None
    if leaf.device.type == "xla":
        spmd = sys.modules.get(f"{XLA_PACKAGE}.distributed.spmd")
        wrapped = leaf if spmd is None else spmd.wrap_if_sharded(leaf)
        return None if wrapped is leaf else wrapped
    return None


def _is_xla_class(kind: type) -> bool:
    return any(
        cls.__name__ == XLA_CLASS and cls.__module__.split(".")[0] == XLA_PACKAGE for cls in kind.__mro__
    )
