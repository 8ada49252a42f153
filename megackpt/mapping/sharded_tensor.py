"""ShardedTensor: one rank's chunk of a global array.

Owns the declaration and its checks. How many ranks' declarations fit together is for `validation` to prove.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megackpt.errors import DeclarationError
from megackpt.mapping.base import RankOffset, ReplicaId, ShardedBase


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
            padding); the overlap is loaded and the rest of the request keeps its values.
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

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.local_shape)
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        self.validate_metadata_integrity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Declare a block of an evenly split array by the position of this rank along each split axis.

        rank_offsets are `(axis, index, fragments)`; axis counts the prepended axes too. An axis without one
        is not split. Local.

        >>> t = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> t.global_shape, t.global_offset
        ((8, 3), (2, 0))

        Raises:
            DeclarationError: an axis outside of the array or given twice, or an index outside of its
                fragments.
        """
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
        index, fragments = place_on_grid(key, len(block), rank_offsets)
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

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Position of this block in the grid of fragments (regular grids only)."""
        if self.axis_fragmentations is None:
            raise DeclarationError(
                f"{self.key!r}: a block of an irregular grid (axis_fragmentations=None) has no position in "
                f"it. Use global_offset.",
                key=self.key,
            )
        sizes = [g // f for g, f in zip(self.global_shape, self.axis_fragmentations, strict=True)]
        return tuple(o // n if n else 0 for o, n in zip(self.global_offset, sizes, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Number of fragments per global axis (regular grids only)."""
        self.local_chunk_offset_in_global()
        assert self.axis_fragmentations is not None
        return self.axis_fragmentations

    def without_data(self) -> ShardedTensor:
        """Return the same declaration with `data=None`."""
        return replace(self, data=None)

    def init_data(self, device: torch.device | str = "cpu") -> None:
        """Allocate `data`, uninitialised, if there is none."""
        if self.data is None:
            flat = self.flattened_range
            shape = self.local_shape if flat is None else (flat.stop - flat.start,)
            self.data = torch.empty(shape, dtype=self.dtype, device=device)

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
        self._check_ranks_of_shapes()
        self._check_inside()
        if self.axis_fragmentations is not None:
            self._check_grid(self.axis_fragmentations)
        if self.flattened_range is not None:
            self._check_flat(self.flattened_range)
        if self.data is not None:
            self._check_data(self.data)

    def _refuse(self, what: str) -> DeclarationError:
        return DeclarationError(f"{self.key!r}: {what}", key=self.key)

    def _check_ranks_of_shapes(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise self._refuse("the key of a ShardedTensor must be a non-empty string.")
        if len(self.global_shape) != len(self.global_offset):
            raise self._refuse(
                f"global_offset {self.global_offset} and global_shape {self.global_shape} differ in length. "
                f"Give one offset per global axis."
            )
        if len(self.block_shape) != len(self.global_shape):
            raise self._refuse(
                f"local_shape {self.local_shape} plus prepend_axis_num {self.prepend_axis_num} makes "
                f"{len(self.block_shape)} axes, but global_shape {self.global_shape} has "
                f"{len(self.global_shape)}."
            )

    def _check_inside(self) -> None:
        for offset, extent, whole in zip(
            self.global_offset, self.block_shape, self.global_shape, strict=True
        ):
            if offset < 0 or offset + extent > whole:
                raise self._refuse(
                    f"the block at global_offset {self.global_offset} of shape {self.block_shape} does not "
                    f"lie inside the global shape {self.global_shape}."
                )

    def _check_grid(self, fragments: tuple[int, ...]) -> None:
        if len(fragments) != len(self.global_shape):
            raise self._refuse(
                f"axis_fragmentations {fragments} must give one number for each axis of {self.global_shape}."
            )
        for offset, extent in zip(self.global_offset, self.block_shape, strict=True):
            if extent and offset % extent:
                raise self._refuse(
                    f"global_offset {self.global_offset} is not a multiple of the block {self.block_shape}, "
                    f"so it is not on a regular grid. Set axis_fragmentations=None for an uneven split."
                )

    def _check_flat(self, flat: slice) -> None:
        numel = math.prod(self.local_shape)
        whole = isinstance(flat.start, int) and isinstance(flat.stop, int) and flat.step in (None, 1)
        if not whole or not 0 <= flat.start <= flat.stop <= numel:
            raise self._refuse(
                f"flattened_range {flat} must be slice(start, stop) without a step, inside the {numel} "
                f"elements of local_shape {self.local_shape}."
            )

    def _check_data(self, data: torch.Tensor) -> None:
        if data.dtype != self.dtype:
            raise self._refuse(f"dtype {self.dtype} is declared but data has {data.dtype}.")
        flat = self.flattened_range
        expected = self.local_shape if flat is None else (flat.stop - flat.start,)
        if tuple(data.shape) != expected:
            source = "local_shape" if flat is None else f"flattened_range {flat.start}:{flat.stop}"
            raise self._refuse(f"data has shape {tuple(data.shape)} but {source} means {expected}.")


def place_on_grid(
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
