"""What one rank declares: sharded entities, and the state dicts that hold them.

Layouts and factories, which not every state dict has, are imported when their names are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from megackpt.ground.lazy_names import lazy_names

if TYPE_CHECKING:
    from megackpt.entities.factory import ShardedTensorFactory
    from megackpt.entities.layout import Layout
    from megackpt.entities.sharded_layout import ComponentPlacement, LayoutComponent, ShardedLayout
else:  # type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "megackpt.entities.factory": ("ShardedTensorFactory",),
            "megackpt.entities.layout": ("Layout",),
            "megackpt.entities.sharded_layout": ("ComponentPlacement", "LayoutComponent", "ShardedLayout"),
        },
    )

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
