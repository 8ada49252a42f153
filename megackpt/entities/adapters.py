"""Adapters turn leaves of other libraries into entities. They are chosen by the class of a leaf.

Each is imported only where a state dict holds a leaf of its library: `torch_sharded`, `xla`,
`megatron_entities`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from megackpt.entities.recognition import (
    MEGATRON_MODULE,
    XLA_PACKAGE,
    is_torch_sharded_class,
    is_xla_class,
)
from megackpt.entities.tree import PathKeys, Steps

Adapter: TypeAlias = Callable[[Steps, Any, PathKeys], Any]
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
    """Return what turns sharded entities of Megatron-Core into ours; None for other classes than theirs."""
    if all(cls.__module__ != MEGATRON_MODULE for cls in kind.__mro__):
        return None
    from megackpt.entities.megatron_entities import adopt_megatron_entity

    return adopt_megatron_entity
