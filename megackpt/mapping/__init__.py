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
from megackpt.mapping.sharded_object import ShardedObject
from megackpt.mapping.sharded_tensor import ShardedTensor
from megackpt.mapping.values import LocalNonpersistentObject, PerRankValue, ReplicatedValue

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
