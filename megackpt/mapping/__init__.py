"""What one rank says it owns: the sharded entities and the trees they stand in."""

from megackpt.mapping.base import (
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from megackpt.mapping.factory import ShardedTensorFactory
from megackpt.mapping.keys import add_prefix_for_sharding
from megackpt.mapping.layout import Part, ShardedLayout
from megackpt.mapping.local import LocalNonpersistentObject
from megackpt.mapping.sharded_object import ShardedObject
from megackpt.mapping.sharded_tensor import ShardedTensor

__all__ = [
    "LocalNonpersistentObject",
    "Part",
    "RankOffset",
    "ReplicaId",
    "ShardedBase",
    "ShardedLayout",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "add_prefix_for_sharding",
    "is_main_replica",
]
