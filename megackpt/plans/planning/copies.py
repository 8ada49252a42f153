"""Copies from stored chunks into requested ones: strided boxes of elements on both sides. Pure, over columns.

`plan_load` makes `Copies`. `CompactCopies` describe the same elements in fewer dims, and one row becomes a
`StridedCopy` only where its bytes are moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata.chunk_table import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Strided copies, one a row; all numbers in elements.

    Attributes:
        stored: row of the stored chunk, `[m]`.
        entity: the entity of the requesting rank, `[m]`.
        shape: extents of the box, `[m, dims]`.
        source_first: its first element in the stored chunk, `[m]`.
        source_stride: strides there, `[m, dims]`.
        target_start: first element relative to the requested box, `[m, dims]`.
        target_first: first element in the requested chunk if that is contiguous, `[m]`.
        target_stride: strides there, `[m, dims]`.
    """

    stored: Ints
    entity: Ints
    shape: Ints
    source_first: Ints
    source_stride: Ints
    target_start: Ints
    target_first: Ints
    target_stride: Ints

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, rows: Ints) -> Copies:
        """Return the chosen copies."""
        return Copies(*(getattr(self, name)[rows] for name in Copies.__slots__))


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """One copy, without dims of extent 1 and with contiguous dims joined; all numbers in elements.

    Attributes:
        entity: the entity of the requesting rank.
        shape: extents.
        source: first element in the stored chunk.
        source_stride: strides there.
        target: first element in the memory of the entity's tensor.
        target_stride: strides there.
    """

    entity: int
    shape: tuple[int, ...]
    source: int
    source_stride: tuple[int, ...]
    target: int
    target_stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous on both sides."""
        return len(self.shape) == 0 or (
            len(self.shape) == 1 and self.source_stride == self.target_stride == (1,)
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class CompactCopies:
    """The columns of many `StridedCopy`, one a row.

    Attributes:
        stored: row of the stored chunk, `[m]`.
        entity: the entity of the requesting rank, `[m]`.
        ndim: number of dims, `[m]`; the columns after those have extent 1 and stride 0.
        shape: extents, `[m, dims]`.
        source: first element in the stored chunk, `[m]`.
        source_stride: strides there, `[m, dims]`.
        target: first element in the memory of the entity's tensor, `[m]`.
        target_stride: strides there, `[m, dims]`.
    """

    stored: Ints
    entity: Ints
    ndim: Ints
    shape: Ints
    source: Ints
    source_stride: Ints
    target: Ints
    target_stride: Ints

    def __len__(self) -> int:
        return len(self.stored)

    @classmethod
    def of(cls, copies: Copies) -> CompactCopies:
        """Leave out dims of extent 1, and join each dim that is contiguous with the next one."""
        # From the outermost dim inwards, `ndim` counts the dims of each row so far.
        m, dims = copies.shape.shape
        ndim = np.zeros(m, np.int64)
        shape = np.ones((m, dims), np.int64)
        source_stride, target_stride = np.zeros((2, m, dims), np.int64)
        for d in range(dims):
            rows = np.flatnonzero(copies.shape[:, d] != 1)
            extent = copies.shape[rows, d]
            source, target = copies.source_stride[rows, d], copies.target_stride[rows, d]
            # Two dims become one if a step of the outer is `extent` steps of this one, on both sides. Until a
            # row has a dim, `last` is -1 and reads the last column, which is not used then.
            last = ndim[rows] - 1
            is_joined = (source_stride[rows, last] == extent * source) & (
                target_stride[rows, last] == extent * target
            )
            is_joined &= last >= 0
            into = np.where(is_joined, last, last + 1)
            shape[rows, into] *= extent
            source_stride[rows, into], target_stride[rows, into] = source, target
            ndim[rows] = into + 1
        return cls(
            copies.stored, copies.entity, ndim, shape, copies.source_first, source_stride,
            copies.target_first, target_stride,
        )  # fmt: skip

    @classmethod
    def concatenate(cls, tables: list[CompactCopies]) -> CompactCopies:
        """Return the rows of one or more tables of equal dims, one after the other."""
        return cls(*(np.concatenate([getattr(table, f.name) for table in tables]) for f in fields(cls)))

    def take(self, rows: Rows) -> CompactCopies:
        """Return the chosen copies."""
        return CompactCopies(*(getattr(self, f.name)[rows] for f in fields(self)))

    def source_row_lengths(self) -> Ints:
        """Return the distance from the first to one past the last element of one index of dim 0, `[m]`."""
        return np.asarray(((self.shape[:, 1:] - 1) * self.source_stride[:, 1:]).sum(axis=1) + 1)

    def source_lengths(self) -> Ints:
        """Return the distance from the first to one past the last element in the stored chunk, `[m]`."""
        return np.asarray(((self.shape - 1) * self.source_stride).sum(axis=1) + 1)

    def are_contiguous(self) -> npt.NDArray[np.bool_]:
        """Return which copies are contiguous on both sides, `[m]`."""
        # More dims than one would have been joined if they were contiguous.
        is_dense = (self.source_stride[:, 0] == 1) & (self.target_stride[:, 0] == 1)
        return np.asarray((self.ndim == 0) | ((self.ndim == 1) & is_dense))

    def copies(self, first: int, stop: int) -> list[StridedCopy]:
        """Return the rows `[first, stop)` one by one."""
        columns = (column[first:stop].tolist() for column in (
            self.entity, self.ndim, self.shape, self.source, self.source_stride, self.target,
            self.target_stride,
        ))  # fmt: skip
        return [
            StridedCopy(entity, tuple(shape[:n]), source, tuple(away[:n]), target, tuple(into[:n]))
            for entity, n, shape, source, away, target, into in zip(*columns, strict=True)
        ]
