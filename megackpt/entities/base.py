"""What all sharded entities share.

These are the types of state dicts, the base class, replica ids, positions in even splits, and checks of the
fields of one entity.

`plans.validation` checks what several ranks declare. Every entity is checked at every save and load, so the
checks have plain loops where `any` and `all` would make a generator for two or three numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index as as_int
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from megackpt.entities.recognition import is_dtensor, is_torch_sharded
from megackpt.errors import DeclarationError

ReplicaId: TypeAlias = int | tuple[int, ...]
RankOffset: TypeAlias = tuple[int, int, int]
"""`(axis, index, fragments)`: fragment `index` of `fragments` equal ones along a global axis."""

StateDict: TypeAlias = dict[str, Any]  # leaves are tensors or any value of the user's
ShardedStateDict: TypeAlias = dict[str, Any]  # leaves may also be sharded entities


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this is the id of the main replica of a chunk: 0, or all zeros. Pure.

    Source: Megatron-Core `dist_checkpointing.mapping.is_main_replica`.
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """What a save stores for an entity that is not stored itself, and what a load makes of that.

    Attributes:
        parts: entities, in nested dicts and lists.
        merge: takes `parts` with every entity replaced by its loaded value; returns that of the whole.
        how: what a load makes of the stored arrays, for `LoadReport.transformed`; empty for nothing to say.
        advice: what to do if the checkpoint does not have the arrays in these shapes; a sentence, or empty.
    """

    parts: Any
    merge: Callable[[Any], Any]
    how: str = ""
    advice: str = ""


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

    def expand(self, on_host: Callable[[torch.Tensor], torch.Tensor]) -> Expansion | None:
        """Return what is stored for this entity; None if that is the entity itself. Local.

        Args:
            on_host: returns the tensor that a load fills in place of `data`: the tensor itself, or a new one
                in host memory.

        Raises:
            DeclarationError: there is no data, and it is needed.
        """
        return None

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


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that need no further look: neither DTensors nor other subclasses."""


def declaration_error(key: object, what: str) -> DeclarationError:
    """Return an error about the entity of this key."""
    return DeclarationError(f"{key!r}: {what}", key=key if isinstance(key, str) else None)


class GridPosition(NamedTuple):
    """The position of a box in an evenly split array, as three fields of an entity.

    Attributes:
        global_shape: shape of the array.
        global_offset: first element of the box in it.
        axis_fragmentations: number of equal fragments along each axis.
    """

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]


def grid_position(key: str, box: Sequence[int], rank_offsets: Sequence[RankOffset]) -> GridPosition:
    """Return the position of a box that is one of equal fragments along some axes, and whole along others.

    Args:
        key: key of the entity, for errors.
        box: shape of the box, with prepended axes.
        rank_offsets: `(axis, index, fragments)` for each split axis.

    Raises:
        DeclarationError: an axis is outside of the array or given twice, or an index outside of its
            fragments.
    """
    axes = len(box)
    index, fragments = [0] * axes, [1] * axes
    seen: set[int] = set()
    for offset in rank_offsets:
        axis, position, count = _checked_offset(key, offset)
        if not 0 <= axis < axes or axis in seen or not 0 <= position < count:
            raise declaration_error(
                key,
                f"invalid rank offset (axis={axis}, index={position}, fragments={count}). Give each "
                f"axis of 0..{axes - 1} at most once, with 0 <= index < fragments.",
            )
        seen.add(axis)
        index[axis], fragments[axis] = position, count
    return GridPosition(tuple(map(mul, box, fragments)), tuple(map(mul, box, index)), tuple(fragments))


MAX_DIMS = 64
"""Dims of an array: those of numpy, through which bytes are written."""


def _checked_offset(key: str, offset: object) -> RankOffset:
    """Return a rank offset, if it is three ints."""
    try:
        axis, position, count = map(as_int, offset)  # type: ignore[call-overload]  # that is checked here
    except (TypeError, ValueError):
        raise declaration_error(
            key,
            f"the rank offset {offset!r} is not (axis, index, fragments). Give three ints for each split "
            f"axis: (0, rank, ranks) for a cut of axis 0.",
        ) from None
    return axis, position, count


def box_of(key: str, shape: Sequence[int], prepended: object) -> tuple[int, ...]:
    """Return the shape of a local box with its prepended axes.

    Raises:
        DeclarationError: the shape is no sequence of ints, or the number of prepended axes no int >= 0.
    """
    if type(prepended) is not int or prepended < 0:
        raise declaration_error(key, f"prepend_axis_num {prepended!r} must be an int >= 0.")
    return (1,) * prepended + as_extents(key, "the local shape", shape)


def check_tensor(key: object, data: object, example: str) -> None:
    """Check that the data of a declaration is a tensor; example is a call that gives one."""
    if not isinstance(data, torch.Tensor):
        raise declaration_error(
            key,
            f"data is a {type(data).__name__}, not a tensor. Give the key, then the tensor: {example}.",
        )
    if data.is_nested or isinstance(data, UninitializedTensorMixin):
        kind = "nested" if data.is_nested else "of a lazy module that has not run"
        raise declaration_error(
            key,
            f"the tensor is {kind}, so it has no shape of ints. Declare each tensor of unbind(), or run the "
            f"lazy module once before the save.",
        )


def check_key(key: object, kind: str) -> None:
    """Check that the key is a non-empty string."""
    if not isinstance(key, str) or not key:
        raise declaration_error(key, f"the key of a {kind} must be a non-empty string.")


def check_replica_id(key: str, replica_id: ReplicaId) -> None:
    """Check that the replica id is an int or a tuple of ints: others would never be the main replica."""
    parts = replica_id if isinstance(replica_id, (tuple, list)) else (replica_id,)
    for part in parts:
        if not isinstance(part, int):
            raise declaration_error(key, f"replica_id {replica_id!r} must be an int or a tuple of ints.")


def as_extents(key: str, field: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return a shape or offset as a tuple of plain ints.

    Raises:
        DeclarationError: it is not a sequence of ints, or one is negative.
    """
    try:
        extents = tuple(map(as_int, values))
    except TypeError:
        raise declaration_error(key, f"{field} {values!r} must be a sequence of ints.") from None
    if extents and min(extents) < 0:
        raise declaration_error(key, f"{field} {extents} must not be negative.")
    return extents


def check_box(
    key: str,
    local_shape: Sequence[int],
    global_shape: Sequence[int],
    global_offset: Sequence[int],
    *,
    prepended: int,
) -> None:
    """Check that the box of a local tensor, with its prepended axes, lies inside of the global array."""
    if not isinstance(prepended, int) or prepended < 0:
        raise declaration_error(key, f"prepend_axis_num {prepended!r} must be an int >= 0.")
    if len(global_shape) != len(global_offset):
        raise declaration_error(
            key,
            f"global_offset {global_offset} and global_shape {global_shape} differ in length. Give one "
            f"offset per global axis.",
        )
    if len(global_shape) > MAX_DIMS:
        raise declaration_error(
            key,
            f"it has {len(global_shape)} dims, and at most {MAX_DIMS} can be stored. Save a view of fewer.",
        )
    box = (1,) * prepended + tuple(local_shape)
    if len(box) != len(global_shape):
        raise declaration_error(
            key,
            f"local_shape {local_shape} plus prepend_axis_num {prepended} makes {len(box)} axes, but "
            f"global_shape {global_shape} has {len(global_shape)}.",
        )
    for offset, extent, whole in zip(global_offset, box, global_shape, strict=True):
        if offset + extent > whole:
            raise declaration_error(
                key,
                f"the box at global_offset {global_offset} of shape {box} does not lie inside the global "
                f"shape {global_shape}.",
            )


def check_grid(
    key: str,
    box: Sequence[int],
    global_shape: Sequence[int],
    global_offset: Sequence[int],
    fragments: Sequence[int],
    *,
    resizable: bool,
) -> None:
    """Check that a box is one of `fragments` equal ones along each axis.

    A box without elements may be anywhere: a rank declares it for an array of which it has nothing. If the
    array may be resized (padding), the fragments need not make up its whole extent.
    """
    if len(fragments) != len(global_shape) or min(fragments, default=1) < 1:
        raise declaration_error(
            key,
            f"axis_fragmentations {fragments} must give one number >= 1 for each axis of {global_shape}.",
        )
    advice = "so it is not on a regular grid. Set axis_fragmentations=None for an uneven split."
    for offset, extent, whole, count in zip(global_offset, box, global_shape, fragments, strict=True):
        if extent and offset % extent:
            raise declaration_error(
                key, f"global_offset {global_offset} is not a multiple of the box {box}, {advice}"
            )
        if extent and extent * count != whole and not resizable:
            raise declaration_error(
                key,
                f"{fragments} fragments of the box {box} do not make up the global shape {global_shape}, "
                f"{advice}",
            )


def check_flattened_range(key: str, flat: slice, local_shape: Sequence[int]) -> None:
    """Check that a flattened range is a plain slice inside of the flattened local shape."""
    numel = math.prod(local_shape)
    plain = isinstance(flat, slice) and flat.step in (None, 1)
    if (
        plain
        and isinstance(flat.start, int)
        and isinstance(flat.stop, int)
        and 0 <= flat.start <= flat.stop <= numel
    ):
        return
    raise declaration_error(
        key,
        f"flattened_range {flat} must be slice(start, stop) without a step, inside the {numel} elements of "
        f"local_shape {tuple(local_shape)}.",
    )


def check_data(
    key: str, data: torch.Tensor, dtype: torch.dtype, local_shape: Sequence[int], flat: slice | None
) -> None:
    """Check that data has the dtype and shape that the entity declares."""
    is_plain = type(data) in _PLAIN
    if not is_plain and not isinstance(data, torch.Tensor):
        raise declaration_error(key, f"data must be a torch.Tensor or None, not {type(data).__name__}.")
    if not is_plain and is_torch_sharded(data):
        local = "to_local()" if is_dtensor(data) else "local_shards()[i].tensor"
        raise declaration_error(
            key,
            f"data is a {type(data).__name__} of torch, which has its own global shape and sharding. Put it "
            f"into the state dict as it is, or declare its local tensor, {local}.",
        )
    if data.dtype != dtype:
        raise declaration_error(key, f"dtype {dtype} is declared but data has {data.dtype}.")
    expected = data_shape(local_shape, flat)
    if data.shape != expected:
        source = "local_shape" if flat is None else f"flattened_range {flat.start}:{flat.stop}"
        raise declaration_error(key, f"data has shape {tuple(data.shape)} but {source} means {expected}.")


def data_shape(local_shape: Sequence[int], flat: slice | None) -> tuple[int, ...]:
    """Return the shape of data: the local shape, or 1-D for a flat range of it."""
    return tuple(local_shape) if flat is None else (flat.stop - flat.start,)
