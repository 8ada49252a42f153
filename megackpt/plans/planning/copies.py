"""Copies from stored chunks into requested ones: strided boxes of elements on both sides. Pure, over columns.

`plan_load` makes `Copies`. `CompactCopies` describe the same elements in fewer dims, and one row becomes a
`StridedCopy` only where its bytes are moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, ChunkTable
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


# The read plan: copies grouped into reads of bounded length. Pure.
#
# If digests cover blocks of a chunk, a read is a whole number of blocks, so that every byte that is copied
# can be checked. Copies from a long stretch of a chunk are cut first; contiguous ones at the ends of blocks.

READ_BYTES = 15 * DIGEST_BLOCK_BYTES
"""The longest read. A whole number of blocks that fits into the buffers of a store."""

MAX_BLOCK_BYTES = 1024 * 1024
"""The longest blocks that a format may have."""

NEAR_BYTES = 64 * 1024
"""Reads in one file that are this near to each other become one request: a request costs more than so many
bytes."""

FAR_BYTES = 2 * DIGEST_BLOCK_BYTES
"""The rows of a copy that are this far apart in a file are read one by one; nearer ones together."""


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Byte ranges of stored chunks, sorted by position, and what is copied out of each; one row a read.

    Attributes:
        stored: row of the chunk, `[n]`.
        start: first byte in the chunk, a multiple of the block, `[n]`.
        stop: one past the last byte: also such a multiple, or the end of the chunk, `[n]`.
        first: the first copy of each read, and the number of all copies, `[n + 1]`.
        all_copies: the copies, whose sources count from the first element of the chunk.
    """

    stored: Ints
    start: Ints
    stop: Ints
    first: Ints
    all_copies: CompactCopies

    def __len__(self) -> int:
        return len(self.stored)

    def copies(self, rows: Sequence[int]) -> list[list[StridedCopy]]:
        """Return the copies of each of some reads, which are sorted and near each other."""
        if not rows:
            return []
        first = self.first[rows[0] : rows[-1] + 2].tolist()
        copies = self.all_copies.copies(first[0], first[-1])
        ends = [at - first[0] for at in first]
        return [copies[ends[i] : ends[i + 1]] for i in (row - rows[0] for row in rows)]


def plan_reads(copies: Copies, table: ChunkTable, *, position: Ints, block_bytes: int) -> Reads:
    """Group copies into reads of at most READ_BYTES, sorted by position.

    Args:
        copies: what a load plan copies.
        table: the stored chunks.
        position: one number for each stored chunk, in whose order reading is cheap, `[n]`.
        block_bytes: a read begins and ends at multiples of this in its chunk, or at the end of the chunk.

    Raises:
        ValueError: block_bytes is above MAX_BLOCK_BYTES.
    """
    if not 0 < block_bytes <= MAX_BLOCK_BYTES:
        raise ValueError(
            f"Chunks.block_bytes is {block_bytes:,}; a format gives 1 to {MAX_BLOCK_BYTES:,}, so that a read "
            f"of whole blocks fits into a buffer."
        )
    itemsize = table.widths()
    compact = _cut(CompactCopies.of(copies), itemsize, block_bytes)
    # After this, copies that read the same blocks are neighbours.
    compact = compact.take(np.lexsort((compact.source, position[compact.stored])))
    # Each copy alone would read its bytes, rounded to whole blocks.
    stored, width = compact.stored, itemsize[compact.stored]
    start = compact.source * width // block_bytes * block_bytes
    stop = -(-(compact.source + compact.source_lengths()) * width // block_bytes) * block_bytes
    stop = np.minimum(stop, table.nbytes[stored])
    first, stops = _join_overlapping(stored, start, stop)
    return Reads(stored[first], start[first], stops, np.append(first, len(compact)), compact)


def _join_overlapping(stored: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Join ranges that overlap in one chunk, up to READ_BYTES; they are sorted by chunk and start.

    Returns the first row of each group, and where each group ends.
    """
    first: list[int] = []
    stops: list[int] = []
    chunk = begin = -1  # of the last group
    for row, (of, low, high) in enumerate(zip(stored.tolist(), start.tolist(), stop.tolist(), strict=True)):
        if of == chunk and low < stops[-1] and high - begin <= READ_BYTES:
            stops[-1] = max(stops[-1], high)
        else:
            first.append(row)
            stops.append(high)
            chunk, begin = of, low
    return np.array(first, np.int64), np.array(stops, np.int64)


def group_reads(reads: Reads, rows: Ints, file: Ints, offset_bytes: Ints, *, most: int) -> list[Ints]:
    """Group reads that are near each other in one file, up to `most` bytes from first to last.

    Args:
        reads: all reads.
        rows: the rows of those to be grouped, sorted by position.
        file: index of the file of each stored chunk, `[n]`.
        offset_bytes: where each stored chunk begins in its file, `[n]`.
        most: bytes.
    """
    if not len(rows):
        return []
    of = reads.stored[rows]
    begins = offset_bytes[of] + reads.start[rows]
    stops = begins + reads.stop[rows] - reads.start[rows]
    # Gaps in a group are read and thrown away, which costs less than another request as long as they are
    # short.
    heads: list[int] = []
    number = first = end = -1  # the file of the last group, and where in it the group begins and ends
    ranges = zip(file[of].tolist(), begins.tolist(), stops.tolist(), strict=True)
    for i, (name, begin, stop) in enumerate(ranges):
        is_near = name == number and begin - end <= NEAR_BYTES
        # Reads of one chunk may overlap, so one may begin before the last; never before its group.
        if is_near and begin >= first and max(stop, end) - first <= most:
            end = max(stop, end)
        else:
            heads.append(i)
            number, first, end = name, begin, stop
    return np.split(rows, heads[1:])


def _cut(copies: CompactCopies, itemsize: Ints, block_bytes: int) -> CompactCopies:
    """Cut copies along dim 0 until each reads at most READ_BYTES and has no far gaps."""
    # Both ends are rounded to whole blocks, so a read may be nearly two blocks longer than its copies.
    room = READ_BYTES - 2 * block_bytes
    done: list[CompactCopies] = []
    while True:
        width = itemsize[copies.stored]
        pitch = copies.source_stride[:, 0] * width
        # Rows with far gaps between them are read one by one; otherwise as many as fit.
        is_far = (copies.ndim > 1) & (pitch - copies.source_row_lengths() * width >= FAR_BYTES)
        rows = np.where(is_far, 1, np.maximum(room // np.maximum(pitch, 1), 1))
        # A contiguous copy is cut at the end of a block, so that no block is read twice.
        is_contiguous = copies.are_contiguous()
        per_block = np.maximum(block_bytes // width, 1)
        rows = np.where(is_contiguous, np.maximum(rows // per_block, 1) * per_block, rows)
        before = np.where(is_contiguous, copies.source % per_block, 0)
        is_long = ((copies.source_lengths() * width > room) | is_far) & (before + copies.shape[:, 0] > rows)
        done.append(copies.take(~is_long))
        if not is_long.any():
            return CompactCopies.concatenate(done)
        # A copy that is cut to single rows loses dim 0, so the loop goes on with its next dim.
        copies = _cut_rows(copies.take(is_long), rows[is_long], before[is_long])


def _cut_rows(copies: CompactCopies, rows: Ints, before: Ints) -> CompactCopies:
    """Cut copies along dim 0 into copies of `rows` rows each; the first one has `before` rows fewer."""
    extent = copies.shape[:, 0]
    counts = -(-(extent + before) // rows)
    of = np.repeat(np.arange(len(copies)), counts)
    edge = joined_ranges(0, counts) * rows[of] - before[of]
    at = np.maximum(edge, 0)
    extents = np.minimum(edge + rows[of], extent[of]) - at
    cut = copies.take(of)
    cut.shape[:, 0] = extents
    cut = replace(
        cut,
        source=cut.source + at * cut.source_stride[:, 0],
        target=cut.target + at * cut.target_stride[:, 0],
    )
    # Dims of extent 1 are left out, so the columns of the other dims move to the front.
    for column, fill in ((cut.shape, 1), (cut.source_stride, 0), (cut.target_stride, 0)):
        column[extents == 1] = np.pad(column[extents == 1, 1:], ((0, 0), (0, 1)), constant_values=fill)
    return replace(cut, ndim=cut.ndim - (extents == 1))
