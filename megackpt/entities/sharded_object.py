"""Leaves that are no tensors: sharded objects, values per rank or replicated, and what is not stored.

Any other plain leaf is common state, which must be equal on all ranks: only rank 0's is stored. `codec`
encodes objects and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from megackpt.entities.base import (
    ReplicaId,
    ShardedBase,
    as_extents,
    check_key,
    check_replica_id,
    declaration_error,
)
from megackpt.ground.arguments import check_choice

UNKNOWN = -1
"""The last extent of a ShardedObject whose unique key was written by an old version, which left it out."""

# The key may contain anything, also slashes and text that looks like a shard: the last shard counts.
_UNIQUE_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[\d.]*)_(?P<shape>[\d.]*)", re.DOTALL)


@dataclass(eq=False)
class ShardedObject(ShardedBase):
    """One element of an array of objects, such as the RNG state of one rank. It is never resharded.

    Attributes:
        key: name of the array of objects.
        data: the object, of any type that the codec supports.
        global_shape: shape of the array, in objects.
        global_offset: position of this object in the array.
        replica_id: 0 or all zeros for the main replica.
        elsewhere: what a load does if the array was stored with another global shape, as by another number of
            ranks: raise an error (`error`), or load nothing and keep `data` (`keep`). With `keep` the caller
            has to find out from common state of its own whether it was loaded.

    Raises:
        DeclarationError: the offset is not inside the shape.

    Source: Megatron-Core `dist_checkpointing.mapping.ShardedObject`.
    """

    key: str
    data: Any  # the user's own object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0
    elsewhere: Literal["error", "keep"] = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        check_key(self.key, "ShardedObject")
        check_replica_id(self.key, self.replica_id)
        self.global_offset = as_extents(self.key, "global_offset", self.global_offset)
        shape = tuple(self.global_shape)
        unknown = shape[-1:] == (UNKNOWN,)
        extents = as_extents(self.key, "global_shape", shape[:-1] if unknown else shape)
        self.global_shape = (*extents, UNKNOWN) if unknown else extents
        inside = len(self.global_shape) == len(self.global_offset) and all(
            o < n for o, n in zip(self.global_offset, extents, strict=False)
        )
        if not inside:
            raise declaration_error(
                self.key,
                f"global_offset {self.global_offset} does not lie in global_shape {self.global_shape}. Give "
                f"one offset per axis, each below the extent.",
            )

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the declaration, without data, of the object with this unique key. Pure.

        Old keys lack the last extent, which is then UNKNOWN (-1). Such an object can be looked up in a
        checkpoint, and cannot be saved.

        >>> ShardedObject.empty_from_unique_key("rng/shard_0.3_1.4").global_offset
        (0, 3)

        Raises:
            DeclarationError: the unique key does not have the form `key/shard_OFFSET_SHAPE`.

        Source: Megatron-Core `ShardedObject.empty_from_unique_key`; there a key must not contain a slash.
        """
        match = _UNIQUE_KEY.fullmatch(unique_key)
        try:
            if match is None:
                raise ValueError(unique_key)
            offset, shape = (
                tuple(map(int, match[name].split("."))) if match[name] else () for name in ("offset", "shape")
            )
        except ValueError:
            raise declaration_error(
                unique_key,
                "this is not the unique key of an object: key/shard_OFFSET_SHAPE, e.g. rng/shard_0_4.",
            ) from None
        if len(offset) == len(shape) + 1:
            shape = (*shape, UNKNOWN)
        return cls(match["key"], None, shape, offset, replica_id)

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The extents of the box that this object is in the array of objects: 1 along each axis."""
        return (1,) * len(self.global_shape)

    @property
    def unique_key(self) -> str:
        """The name of this object, `key/shard_OFFSET_SHAPE`, with numbers joined by dots."""
        offset, shape = (".".join(map(str, v)) for v in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def without_data(self) -> ShardedObject:
        """Return the same declaration with `data=None`. Pure."""
        return replace(self, data=None)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedObject:
        """Raise an error: no tensor is sharded like an object. Pure.

        Raises:
            DeclarationError: always.
        """
        raise declaration_error(
            self.key,
            f"this is a ShardedObject; a tensor such as an optimizer state ({key!r}) cannot be sharded like "
            f"it. Declare the parameter as a ShardedTensor.",
        )


@dataclass(eq=False)
class PerRankValue:
    """A value that each rank has of its own: all values are stored, and they may differ.

    Every rank of the job must declare the key. A load on as many ranks gives each rank its own value back. On
    another number of ranks no stored value belongs to a rank: that is an error, or, with `elsewhere="keep"`,
    each rank keeps the value that it declares and a warning is logged.

    Attributes:
        key: name in the checkpoint; the same on all ranks.
        data: this rank's value, of any type that the codec supports.
        elsewhere: what a load on another number of ranks does: raise an error, or keep `data`.
    """

    key: str
    data: Any  # the user's own value
    elsewhere: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        check_key(self.key, "PerRankValue")
        check_choice(f"{self.key!r}: elsewhere", self.elsewhere, ("error", "keep"))

    def on(self, rank: int, ranks: int) -> ShardedObject:
        """Return the object that stands for this value on one rank of a job. Pure."""
        return ShardedObject(self.key, self.data, (ranks,), (rank,))


@dataclass(eq=False)
class ReplicatedValue:
    """A value that is equal on all ranks that declare it: stored once, and compared at save.

    Unlike common state it need not be on all ranks, and it is loaded by key, on the ranks that request it.
    For large tensors declare a ShardedTensor with a replica_id instead.

    Attributes:
        key: name in the checkpoint.
        data: the value, of any type that the codec supports.
    """

    key: str
    data: Any  # the user's own value

    def __post_init__(self) -> None:
        check_key(self.key, "ReplicatedValue")

    def on(self, rank: int) -> ShardedObject:
        """Return the object that stands for this value on a rank; the save chooses the main replica. Pure."""
        return ShardedObject(self.key, self.data, (1,), (0,), replica_id=rank + 1)


class LocalNonpersistentObject:
    """A leaf that `save` drops. `load` puts its local value into the loaded state dict.

    Source: Megatron-Core `dist_checkpointing.mapping.LocalNonpersistentObject`.
    """

    def __init__(self, obj: Any) -> None:  # the user's own object
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped object."""
        return self.obj
