"""ShardedObject: one rank's element of a global array of Python objects.

Owns the declaration; how values become bytes is the codec's affair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megackpt.errors import DeclarationError
from megackpt.mapping.base import ReplicaId, ShardedBase


@dataclass(eq=False)
class ShardedObject(ShardedBase):
    """One element of an array of objects, e.g. the RNG state of one rank. Never resharded.

    Attributes:
        key: name of the array of objects.
        data: the object; anything the codec knows.
        global_shape: shape of the array, in objects.
        global_offset: position of this object in it.
        replica_id: 0 or all zeros for the main replica.

    Raises:
        DeclarationError: the offset does not lie in the shape.

    Source: Megatron-Core `dist_checkpointing.mapping.ShardedObject`.
    """

    key: str
    data: Any  # the user's own object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        inside = len(self.global_shape) == len(self.global_offset) and all(
            0 <= o < n for o, n in zip(self.global_offset, self.global_shape, strict=True)
        )
        if not inside:
            raise DeclarationError(
                f"{self.key!r}: global_offset {self.global_offset} does not lie in global_shape "
                f"{self.global_shape}. Give one offset per axis, each below the extent.",
                key=self.key,
            )

    @property
    def unique_key(self) -> str:
        """`key/shard_OFFSET_SHAPE`, both joined by dots: the name of this one object."""
        offset, shape = (".".join(map(str, v)) for v in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def without_data(self) -> ShardedObject:
        """Return the same declaration with `data=None`."""
        return replace(self, data=None)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedObject:
        """Objects have no tensors sharded like them.

        Raises:
            DeclarationError: always.
        """
        raise DeclarationError(
            f"{self.key!r} is a ShardedObject; a tensor such as an optimizer state ({key!r}) cannot be "
            f"sharded like it. Declare the parameter as a ShardedTensor.",
            key=self.key,
        )
