"""Entities and tensors of other libraries, recognised by their classes without importing these libraries.

A library that is not loaded has no instances. `flatten.adapter_of` has what turns them into entities of ours.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
"""The module of Megatron-Core that defines its sharded entities."""

XLA_CLASS = "XLAShardedTensor"
XLA_PACKAGE = "torch_xla"


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
