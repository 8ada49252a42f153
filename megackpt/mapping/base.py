"""What all sharded entities have in common.

Owns the base class, replica ids and the aliases of state dicts; each kind of entity has a file of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch

ReplicaId: TypeAlias = "int | tuple[int, ...]"
RankOffset: TypeAlias = tuple[int, int, int]
"""`(axis, index, fragments)`: fragment `index` of `fragments` equal ones along a global axis."""

StateDict: TypeAlias = dict[str, Any]  # leaves are tensors or any value of the user's
ShardedStateDict: TypeAlias = dict[str, Any]  # leaves may also be sharded entities


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Say whether this replica is the one that stands for the chunk: 0, or all zeros.

    Source: Megatron-Core `dist_checkpointing.mapping.is_main_replica`.
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


class ShardedBase(ABC):
    """A leaf of a sharded state dict that stands for a part of something global.

    Entities are declarations: cheap, mutable as in Megatron-Core (its models change `key` and `replica_id`
    of the entities they are handed), and never changed by megackpt once given to `save` or `load`.

    Attributes:
        key: unique name of the global array or object in the checkpoint.
        data: the local tensor or object; None in a declaration without data.
        replica_id: which copy of the same chunk this is; see `is_main_replica`.
    """

    key: str
    data: Any
    replica_id: ReplicaId

    def __post_init__(self) -> None:  # noqa: B027 - an entity may have nothing to check
        """Check the fields against each other; entities are dataclasses, which call it when they are made."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same declaration with `data=None`."""

    def validate_metadata_integrity(self) -> None:
        """Check the fields against each other, as is done when an entity is made.

        Raises:
            DeclarationError: naming the key and the fields that disagree.
        """
        self.__post_init__()

    @abstractmethod
    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedBase:
        """Declare another tensor that is sharded like this one, e.g. an optimizer state of a parameter.

        data has the local shape of this entity or, with `flattened_range`, is that 1-D slice of it. The
        dtype is that of data; replica_id stays where None is given.
        """
