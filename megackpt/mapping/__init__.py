"""What one rank declares: sharded entities, and the state dicts that hold them."""

from megackpt.mapping.base import (
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from megackpt.mapping.factory import ShardedTensorFactory
from megackpt.mapping.layout import Layout
from megackpt.mapping.sharded_layout import ComponentPlacement, LayoutComponent, ShardedLayout
from megackpt.mapping.sharded_object import (
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    ShardedObject,
)
from megackpt.mapping.sharded_tensor import ShardedTensor

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
