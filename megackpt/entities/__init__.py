"""What one rank declares: sharded entities, and the state dicts that hold them.

Layouts and factories, which not every state dict has, are imported when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megackpt.entities.base import (
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from megackpt.entities.sharded_object import (
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    ShardedObject,
)
from megackpt.entities.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from megackpt.entities.factory import ShardedTensorFactory
    from megackpt.entities.layout import Layout
    from megackpt.entities.sharded_layout import ComponentPlacement, LayoutComponent, ShardedLayout

__all__ = [
    "ComponentPlacement",
    "Layout",
    "LayoutComponent",
    "LocalNonpersistentObject",
    "PerRankValue",
    "RankOffset",
    "ReplicaId",
    "ReplicatedValue",
    "ShardedBase",
    "ShardedLayout",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "is_main_replica",
]

_LAZY_IMPORTS = {
    "ComponentPlacement": "sharded_layout",
    "Layout": "layout",
    "LayoutComponent": "sharded_layout",
    "ShardedLayout": "sharded_layout",
    "ShardedTensorFactory": "factory",
}


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_IMPORTS[name]}"), name)
