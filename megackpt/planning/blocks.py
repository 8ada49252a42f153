"""Strided blocks: what copies move, in the fewest dims.

Pure. Planning deals with blocks in columns; one becomes a `BlockCopy` only where its bytes are moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.metadata.chunk_table import Rows
from megackpt.planning.copies import Copies


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One strided block; numbers in elements, dims of extent 1 left out and contiguous ones joined.

    Attributes:
        entity: the requester's entity.
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
    def source_stop(self) -> int:
        """One past the last element it touches in the stored chunk."""
        return self.source + sum((n - 1) * s for n, s in zip(self.shape, self.source_stride, strict=True)) + 1

    @property
    def is_run(self) -> bool:
        """Whether it is contiguous on both sides."""
        return len(self.shape) == 0 or (
            len(self.shape) == 1 and self.source_stride == self.target_stride == (1,)
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The same in columns, one block a row.

    Attributes:
        stored: row of the stored chunk, `[m]`.
        entity: the requester's entity, `[m]`.
        ndim: number of dims, `[m]`; those behind have extent 1 and stride 0.
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
    def of(cls, copies: Copies) -> Blocks:
        """Leave dims of extent 1 out of copies, and join those that are contiguous with the next one."""
        m, dims = copies.shape.shape
        ndim = np.zeros(m, np.int64)
        shape = np.ones((m, dims), np.int64)
        source_stride, target_stride = np.zeros((2, m, dims), np.int64)
        for d in range(dims):
            rows = np.flatnonzero(copies.shape[:, d] != 1)
            extent = copies.shape[rows, d]
            source, target = copies.source_stride[rows, d], copies.target_stride[rows, d]
            last = ndim[rows] - 1  # -1 where there is none yet
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
    def concatenate(cls, parts: list[Blocks]) -> Blocks:
        """Return the rows of several, one behind the other; at least one is given, all of equal dims."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def take(self, rows: Rows) -> Blocks:
        """Return the chosen blocks."""
        return Blocks(*(getattr(self, f.name)[rows] for f in fields(self)))

    def inner_spans(self) -> Ints:
        """From the first to one past the last element of one row along the first dim, in the chunk, `[m]`."""
        return np.asarray(((self.shape[:, 1:] - 1) * self.source_stride[:, 1:]).sum(axis=1) + 1)

    def spans(self) -> Ints:
        """From the first to one past the last element in the chunk, `[m]`."""
        return np.asarray(((self.shape - 1) * self.source_stride).sum(axis=1) + 1)

    def are_runs(self) -> npt.NDArray[np.bool_]:
        """Whether they are contiguous on both sides, `[m]`."""
        is_dense = (self.source_stride[:, 0] == 1) & (self.target_stride[:, 0] == 1)
        return np.asarray((self.ndim == 0) | ((self.ndim == 1) & is_dense))

    def copies(self, first: int, stop: int) -> list[BlockCopy]:
        """Return the blocks `[first, stop)` one by one."""
        columns = (column[first:stop].tolist() for column in (
            self.entity, self.ndim, self.shape, self.source, self.source_stride, self.target,
            self.target_stride,
        ))  # fmt: skip
        return [
            BlockCopy(entity, tuple(shape[:n]), source, tuple(away[:n]), target, tuple(into[:n]))
            for entity, n, shape, source, away, target, into in zip(*columns, strict=True)
        ]
