"""The base class of sharded entities, replica ids, and the types of state dicts."""

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
    """Return whether this is the id of the main replica of a chunk: 0, or all zeros.

    Source: Megatron-Core `dist_checkpointing.mapping.is_main_replica`.
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


class ShardedBase(ABC):
    """A leaf of a sharded state dict that declares this rank's chunk of a global array or object.

    Entities are declarations: cheap, and mutable as in Megatron-Core, whose models change `key` and
    `replica_id` of entities that they are given. `save` and `load` never change them.

    Attributes:
        key: unique name of the global array or object in the checkpoint.
        data: the local tensor or object; None in a declaration without data.
        replica_id: which replica of the chunk this is; see `is_main_replica`.
    """

    key: str
    data: Any
    replica_id: ReplicaId

    def __post_init__(self) -> None:  # noqa: B027 - an entity may have nothing to check
        """Check the fields against each other. Dataclasses call it when they are made."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same declaration with `data=None`."""

    def validate_metadata_integrity(self) -> None:
        """Check the fields against each other, as when the entity was made.

        Raises:
            DeclarationError: fields contradict each other; the text names the key and the fields.
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
        """Declare another tensor that is sharded like this one, such as an optimizer state of a parameter.

        Args:
            key: unique name of the other global array.
            data: a tensor of the local shape, or with flattened_range that 1-D slice of it; its dtype is that
                of the array.
            replica_id: None for the one of this entity.
            flattened_range: which slice of the flattened local tensor data is; None for all of it.
        """
