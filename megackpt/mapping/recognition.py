"""Entities and tensors of other libraries, recognised by their classes without importing these libraries.

A library that is not loaded has no instances. What a tensor or entity declares is read by an adapter
(`torch_sharded`, `xla`, `megatron_entities`), which is imported only where a state dict holds one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch

MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
"""The module of Megatron-Core that defines its sharded entities."""

XLA_CLASS = "XLAShardedTensor"
XLA_PACKAGE = "torch_xla"


class XlaShard(Protocol):
    """What one device holds of a tensor. Source: torch_xla 2.9, `distributed.spmd.XLAShard`.

    Attributes:
        data: a copy in host memory, padded at the ends of the array to the shape that all shards have.
        indices: the box without padding, one slice per dim; Ellipsis where every device has it all.
        shard_device: name of the device.
        replica_id: which copy of the box this is, counted over the devices of all hosts.
    """

    data: torch.Tensor
    indices: Any  # Ellipsis, whose type has no name before Python 3.10's types.EllipsisType, or slices
    shard_device: str
    replica_id: int


class XlaTensor(Protocol):
    """The part of `XLAShardedTensor` that is used here. Source: torch_xla 2.9.

    Attributes:
        shape: of the global array.
        dtype: of the global array.
        global_tensor: the tensor that the user sees; of a replicated one only it can be filled.
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of the global array."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    @property
    def global_tensor(self) -> torch.Tensor:
        """The tensor without its wrapper."""

    @property
    def local_shards(self) -> Sequence[XlaShard]:
        """What the devices of this host hold, copied to host memory."""

    def load_local_shards_(self, shards: Sequence[XlaShard]) -> None:
        """Put the data of shards, one of every device of this host, onto the devices."""


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


def may_have_xla(kinds: Iterable[type]) -> bool:
    """Return whether leaves of these classes may be tensors that XLA has sharded.

    As long as torch_xla is not loaded, there are none. Afterwards any tensor may be marked as sharded.
    """
    is_loaded = f"{XLA_PACKAGE}.distributed.spmd" in sys.modules
    return any(_is_xla_class(kind) or (is_loaded and issubclass(kind, torch.Tensor)) for kind in kinds)


def xla_tensor_of(leaf: Any) -> XlaTensor | None:
    """Return the XLAShardedTensor of a leaf: itself, or the wrapper of a tensor marked as sharded; else None.

    `mark_sharding` does not change the class of parameters, so the state dict of a model has plain tensors,
    which torch_xla wraps on demand.
    """
    if _is_xla_class(type(leaf)):
        tensor: XlaTensor = leaf
        return tensor
    # torch warns at every attribute of its ShardedTensor, so the class is checked before the device.
    if not isinstance(leaf, torch.Tensor) or is_sharded_tensor_class(type(leaf)):
        return None
    if leaf.device.type == "xla":
        spmd = sys.modules.get(f"{XLA_PACKAGE}.distributed.spmd")
        wrapped = leaf if spmd is None else spmd.wrap_if_sharded(leaf)
        return None if wrapped is leaf else cast("XlaTensor", wrapped)
    return None


def _is_xla_class(kind: type) -> bool:
    return any(
        cls.__name__ == XLA_CLASS and cls.__module__.split(".")[0] == XLA_PACKAGE for cls in kind.__mro__
    )
