"""ShardedTensor: one rank's chunk of a global array.

Owns the declaration. How many ranks' declarations fit together is for `validation` to prove.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter, is_

import numpy as np
import torch

from megackpt.errors import DeclarationError
from megackpt.geometry import Ints, View, row_major_strides
from megackpt.mapping.base import RankOffset, ReplicaId, ShardedBase
from megackpt.mapping.checks import (
    as_extents,
    check_box,
    check_data,
    check_flattened_range,
    check_grid,
    check_key,
    check_replica_id,
    data_shape,
    declaration_error,
)
from megackpt.mapping.views import ViewChunk, chunks_of_view, whole_view


@dataclass(eq=False)
class ShardedTensor(ShardedBase):
    """A local tensor as a box of a global array, or as a flat range of such a box.

    Attributes:
        key: unique name of the global array.
        data: the local tensor, `local_shape`; with `flattened_range` 1-D; None where only the declaration
            matters.
        dtype: dtype of the global array; that of data.
        local_shape: shape of the local block, without prepended axes.
        global_shape: shape of the global array, prepended axes included.
        global_offset: first element of the block in the global array, one int per global axis.
        axis_fragmentations: number of equal fragments per global axis; None for an irregular grid.
        replica_id: 0 or all zeros for the main replica; every element needs exactly one over all ranks.
        prepend_axis_num: how many leading global axes, of local size 1, the local tensor lacks (stacked
            layers).
        allow_shape_mismatch: the global shape may differ between checkpoint and request (vocabulary
            padding); the overlap is loaded and the rest of the request becomes zeros.
        flattened_range: `slice(start, stop)` of the row-major flattening of the local block that data holds.

    Raises:
        DeclarationError: the fields contradict each other.

    Source: Megatron-Core `dist_checkpointing.mapping.ShardedTensor`; `flattened_range` as up to its 0.15.
    """

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    # The fields when it was made.
    _checked: tuple[object, ...] = field(default=(object(),), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.local_shape = as_extents(self.key, "local_shape", self.local_shape)
        self.global_shape = as_extents(self.key, "global_shape", self.global_shape)
        self.global_offset = as_extents(self.key, "global_offset", self.global_offset)
        if self.axis_fragmentations is not None:
            fragments = self.axis_fragmentations
            self.axis_fragmentations = as_extents(self.key, "axis_fragmentations", fragments)
        self.validate_metadata_integrity()
        self._checked = self.declared()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: slice | None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Declare a block of an evenly split array by the position of this rank along each split axis.

        rank_offsets are `(axis, index, fragments)`; axis counts the prepended axes too. An axis without one
        is not split. Local.

        >>> t = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> t.global_shape, t.global_offset
        ((8, 3), (2, 0))

        flattened_range is there for Megatron-Core's signature, where it is always None: 1-D data do not tell
        the shape of the block that they are a range of, which `from_rank_offsets_flat` is given.

        Raises:
            DeclarationError: an axis outside of the array or given twice, an index outside of its fragments,
                or a flattened_range.
        """
        if flattened_range is not None:
            raise declaration_error(
                key,
                f"flattened_range={flattened_range} says that data of shape {tuple(data.shape)} is a range "
                f"of a flattened block, whose shape is not given. Call from_rank_offsets_flat(key, data, "
                f"shape_of_the_block, *rank_offsets, flattened_range=...).",
            )
        return cls._from_offsets(
            key,
            data,
            tuple(data.shape),
            rank_offsets,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
            None,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: RankOffset,
        flattened_range: slice,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Like `from_rank_offsets`, for 1-D data: `flattened_range` of a `non_flat_local_shape` block."""
        shape = tuple(non_flat_local_shape)
        return cls._from_offsets(
            key,
            data,
            shape,
            rank_offsets,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
            flattened_range,
        )

    @classmethod
    def _from_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        local_shape: tuple[int, ...],
        rank_offsets: Sequence[RankOffset],
        replica_id: ReplicaId,
        prepend_axis_num: int,
        allow_shape_mismatch: bool,
        flattened_range: slice | None,
    ) -> ShardedTensor:
        block = (1,) * prepend_axis_num + local_shape
        index, fragments = grid_position(key, len(block), rank_offsets)
        return cls(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=local_shape,
            global_shape=tuple(n * f for n, f in zip(block, fragments, strict=True)),
            global_offset=tuple(n * i for n, i in zip(block, index, strict=True)),
            axis_fragmentations=fragments,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
            flattened_range=flattened_range,
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the local block in the global array: `local_shape` with its prepended axes."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def has_regular_grid(self) -> bool:
        """Whether the array is split into equal fragments along every axis."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Index of the local block in the global array: an int for each prepended axis, then slices."""
        slices = [slice(o, o + n) for o, n in zip(self.global_offset, self.block_shape, strict=True)]
        return (*self.global_offset[: self.prepend_axis_num], *slices[self.prepend_axis_num :])

    def local_coordinates(self) -> tuple[Ints, ...]:
        """Index in the local block of every element of data: one array per local dim, in data's order.

        >>> t = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 3), flattened_range=slice(2, 5))
        >>> [axis.tolist() for axis in t.local_coordinates()]
        [[0, 1, 1], [2, 0, 1]]
        """
        flat = self.flattened_range or slice(0, math.prod(self.local_shape))
        return tuple(
            np.arange(flat.start, flat.stop, dtype=np.int64) // stride % extent
            for stride, extent in zip(row_major_strides(self.local_shape), self.local_shape, strict=True)
        )

    def global_coordinates(self) -> tuple[Ints, ...]:
        """Index in the global array of every element of data: one array per global axis, in data's order."""
        count = math.prod(data_shape(self.local_shape, self.flattened_range))
        leading = (np.zeros(count, np.int64),) * self.prepend_axis_num
        coordinates = (*leading, *self.local_coordinates())
        return tuple(axis + offset for axis, offset in zip(coordinates, self.global_offset, strict=True))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Position of this block in the grid of fragments.

        Raises:
            DeclarationError: the grid is irregular (axis_fragmentations is None).
        """
        self._fragments("position")
        return tuple(o // n if n else 0 for o, n in zip(self.global_offset, self.block_shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Extent of one fragment along each global axis: no chunk of a stored array may be larger.

        Raises:
            DeclarationError: the grid is irregular (axis_fragmentations is None).

        Source: Megatron-Core `ShardedTensor.max_allowed_chunks`, name and meaning.
        """
        fragments = self._fragments("extent")
        return tuple(whole // count for whole, count in zip(self.global_shape, fragments, strict=True))

    def _fragments(self, wanted: str) -> tuple[int, ...]:
        if self.axis_fragmentations is None:
            raise declaration_error(
                self.key,
                f"an irregular grid (axis_fragmentations=None) gives its fragments no common {wanted}. Use "
                f"global_offset and local_shape.",
            )
        return self.axis_fragmentations

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Declare `[start, start + length)` of this dim of every rank's block as an array of its own.

        dim counts data's dims, without prepended axes. All ranks are taken to narrow in the same way, so the
        global extent and offset shrink as the local extent does. One block gives one; a flat shard gives what
        it holds of the narrowed block, possibly nothing: a flat range along dim 0, else up to `2 n - 1`
        rectangles. Data are views. The key stays: the caller gives each part its own.

        >>> t = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4), (0, 1, 2))
        >>> [(n.local_shape, n.global_shape, n.global_offset) for n in t.narrow(0, 4, 2)]
        [((2, 4), (4, 4), (2, 0))]

        Raises:
            DeclarationError: no such dim or range, or the array is not cut into equal fragments along it.

        Source: Megatron-Core `ShardedTensor.narrow`; there flat ones along dim 0 only.
        """
        shape, offset = self._narrowed_place(dim, start, length)
        view = View.of(self.local_shape).narrow(dim, start, length)
        block = replace(
            self,
            data=None,
            local_shape=view.shape,
            global_shape=shape,
            global_offset=offset,
            flattened_range=None,
        )
        if self.flattened_range is None:
            return [replace(block, data=whole_view(view, self.data))]
        return [
            declare_chunk(block, piece) for piece in chunks_of_view(view, self.data, self.flattened_range)
        ]

    def _narrowed_place(self, dim: int, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the global shape and offset with those of one local dim scaled to `length`."""
        if not 0 <= dim < len(self.local_shape) or not 0 <= start <= start + length <= self.local_shape[dim]:
            raise declaration_error(
                self.key,
                f"[{start}:{start + length}) of dim {dim} is no part of local_shape {self.local_shape}. "
                f"Count dims without prepended axes and stay inside of the extent.",
            )
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        whole, first = self.global_shape[axis], self.global_offset[axis]
        if not extent or whole % extent or first % extent:
            raise declaration_error(
                self.key,
                f"cannot narrow dim {dim}: the block of {extent} at {first} is not one of equal fragments of "
                f"{whole}, so the place of its part in the narrowed array is not known. Declare it directly.",
            )

        def scaled(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:axis], values[axis] // extent * length, *values[axis + 1 :])

        return scaled(self.global_shape), scaled(self.global_offset)

    def without_data(self) -> ShardedTensor:
        """Return the same declaration with `data=None`."""
        return self.with_data(None)

    def with_data(self, data: torch.Tensor | None) -> ShardedTensor:
        """Return the same declaration of other data, checked like a new one.

        Fields that nobody has changed since they were checked are not checked again: at every save and load
        of a large model this is most of the work.

        Raises:
            DeclarationError: the fields contradict each other, or the data.
        """
        # By identity: what is equal may be of another type, and the fields are of types without change.
        if not all(map(is_, self.declared(), self._checked)):
            return replace(self, data=data)
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, data=data)
        if data is not None:
            check_data(self.key, data, self.dtype, self.local_shape, self.flattened_range)
        return copy

    def declared(self) -> tuple[object, ...]:
        """All fields but data: equal for tensors that say the same of themselves."""
        place: tuple[object, ...] = _SAID(self)
        if isinstance(self.replica_id, list):  # it may change and stay the same object
            return tuple(tuple(f) if isinstance(f, list) else f for f in place)
        return place

    def init_data(
        self, device: torch.device | str = "cpu", init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocate `data` as `init_fn(shape, dtype=..., device=...)`, if there is none."""
        if self.data is None:
            shape = data_shape(self.local_shape, self.flattened_range)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedTensor:
        """Declare another tensor of the same sharding; see `ShardedBase.retarget`."""
        return replace(
            self,
            key=key,
            data=data,
            dtype=data.dtype,
            replica_id=self.replica_id if replica_id is None else replica_id,
            flattened_range=flattened_range,
        )

    def validate_metadata_integrity(self) -> None:
        """Check the fields against each other.

        Raises:
            DeclarationError: naming the key and the fields that disagree.
        """
        check_key(self.key, "ShardedTensor")
        check_replica_id(self.key, self.replica_id)
        if not isinstance(self.dtype, torch.dtype):
            raise declaration_error(self.key, f"dtype must be a torch.dtype, not {self.dtype!r}.")
        place = self.global_shape, self.global_offset
        check_box(self.key, self.local_shape, *place, prepended=self.prepend_axis_num)
        if self.axis_fragmentations is not None:
            resizable = self.allow_shape_mismatch
            check_grid(self.key, self.block_shape, *place, self.axis_fragmentations, resizable=resizable)
        if self.flattened_range is not None:
            check_flattened_range(self.key, self.flattened_range, self.local_shape)
        if self.data is not None:
            check_data(self.key, self.data, self.dtype, self.local_shape, self.flattened_range)


def declare_chunk(block: ShardedTensor, piece: ViewChunk) -> ShardedTensor:
    """Declare the piece that a flat shard holds of a block; block is its declaration without data."""
    if piece.flattened_range is not None:
        return replace(block, data=piece.data, flattened_range=piece.flattened_range)
    inside = (0,) * block.prepend_axis_num + piece.start
    offset = tuple(o + i for o, i in zip(block.global_offset, inside, strict=True))
    return replace(
        block, data=piece.data, local_shape=piece.shape, global_offset=offset, axis_fragmentations=None
    )


def grid_position(
    key: str, axes: int, rank_offsets: Sequence[RankOffset]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the fragment index and the number of fragments along each of `axes` global axes.

    Raises:
        DeclarationError: an axis outside of the array or given twice, or an index outside of its fragments.
    """
    index, fragments = [0] * axes, [1] * axes
    seen: set[int] = set()
    for axis, position, count in rank_offsets:
        if not 0 <= axis < axes or axis in seen or not 0 <= position < count:
            raise DeclarationError(
                f"{key!r}: invalid rank offset (axis={axis}, index={position}, fragments={count}). Give each "
                f"axis of 0..{axes - 1} at most once, with 0 <= index < fragments.",
                key=key,
            )
        seen.add(axis)
        index[axis], fragments[axis] = position, count
    return tuple(index), tuple(fragments)


_SAID = attrgetter(*(one.name for one in fields(ShardedTensor) if one.init and one.name != "data"))


@dataclass(frozen=True, slots=True, eq=False)
class TorchShardedTensor:
    """A DTensor, or a ShardedTensor of torch, of a state dict, with what this rank holds of it.

    Attributes:
        key: its path in the state dict, joined with dots.
        data: the tensor; a load fills its local tensor or shards and returns it.
        chunks: the boxes that this rank holds, as views of its memory; none on a rank outside of the mesh.
        ranks: number of ranks in the mesh or process group.
    """

    key: str
    data: torch.Tensor
    chunks: tuple[ShardedTensor, ...]
    ranks: int
