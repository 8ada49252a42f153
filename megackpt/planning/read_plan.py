"""The read plan: copies grouped into reads of bounded size.

Pure. Where digests cover fixed blocks of a chunk, a read is a whole number of blocks: every byte that is
copied is checked. Copies that reach far are cut first, at block ends where both sides are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints, joined_ranges
from megackpt.metadata import DIGEST_BLOCK_BYTES, ChunkTable, itemsizes
from megackpt.planning.copies import CompactCopies, Copies, StridedCopy

READ_BYTES = 15 * DIGEST_BLOCK_BYTES
"""Upper bound of one read. A whole number of blocks that fits into the buffers of a store."""

MAX_BLOCK_BYTES = 1024 * 1024
"""The longest blocks that a format may ask to be read whole."""

NEAR_BYTES = 64 * 1024
"""Reads in one file this near to each other are one request: to ask again costs more than so many bytes."""

FAR_BYTES = 2 * DIGEST_BLOCK_BYTES
"""Rows of a block this far apart in a file are read one by one; nearer ones with what lies between."""

GRAIN_BYTES = 64 * 1024
"""Where a format can read any byte: gaps that are shorter are read with what lies around them."""


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Ranges of stored chunks, sorted by place, and what is copied out of each; one row a read.

    Attributes:
        stored: row of the chunk, `[n]`.
        start: first byte in the chunk, a multiple of the block, `[n]`.
        stop: one past the last; such a multiple too, or the chunk's end, `[n]`.
        first: its first block; the last one is before the first of the next read, `[n + 1]`.
        blocks: what is copied, sources counted from the chunk's first element.
    """

    stored: Ints
    start: Ints
    stop: Ints
    first: Ints
    blocks: CompactCopies

    def __len__(self) -> int:
        return len(self.stored)

    def copies(self, rows: Sequence[int]) -> list[list[StridedCopy]]:
        """Return what is copied out of each of some reads, which are sorted and near each other."""
        if not rows:
            return []
        first = self.first[rows[0] : rows[-1] + 2].tolist()
        blocks = self.blocks.copies(first[0], first[-1])
        ends = [at - first[0] for at in first]
        return [blocks[ends[i] : ends[i + 1]] for i in (row - rows[0] for row in rows)]


def plan_reads(copies: Copies, table: ChunkTable, *, place: Ints, block_bytes: int) -> Reads:
    """Group copies into reads, sorted by place.

    table holds the stored chunks and place one number for each, in whose order they are best read. A read
    begins and ends at multiples of block_bytes in its chunk, or at the chunk's end; it has at most
    READ_BYTES.

    Raises:
        ValueError: block_bytes is above MAX_BLOCK_BYTES.
    """
    if not 0 < block_bytes <= MAX_BLOCK_BYTES:
        raise ValueError(
            f"Chunks.block_bytes is {block_bytes:,}; a format gives 1 to {MAX_BLOCK_BYTES:,}, so that a read "
            f"of whole blocks fits into a buffer."
        )
    itemsize = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
    blocks = _cut(CompactCopies.of(copies), itemsize, block_bytes)
    blocks = blocks.take(np.lexsort((blocks.source, place[blocks.stored])))
    stored, width = blocks.stored, itemsize[blocks.stored]
    start = blocks.source * width // block_bytes * block_bytes
    stop = -(-(blocks.source + blocks.source_lengths()) * width // block_bytes) * block_bytes
    stop = np.minimum(stop, table.nbytes[stored])
    first, stops = _overlapping(stored, start, stop)
    return Reads(stored[first], start[first], stops, np.append(first, len(blocks)), blocks)


def _overlapping(stored: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Join ranges that overlap in one chunk, as far as a read may reach; sorted by chunk and start.

    Returns the first row of each group, and where each group ends.
    """
    first: list[int] = []
    stops: list[int] = []
    chunk = begin = -1
    for row, (of, low, high) in enumerate(zip(stored.tolist(), start.tolist(), stop.tolist(), strict=True)):
        if of == chunk and low < stops[-1] and high - begin <= READ_BYTES:
            stops[-1] = max(stops[-1], high)
        else:
            first.append(row)
            stops.append(high)
            chunk, begin = of, low
    return np.array(first, np.int64), np.array(stops, np.int64)


def group_reads(reads: Reads, rows: Ints, file: Ints, offset_bytes: Ints, *, most: int) -> list[Ints]:
    """Group reads that lie near each other in one file; a group spans at most `most` bytes.

    rows are those of the reads in question, sorted by place. file and offset_bytes say where each chunk lies,
    `[n]`.
    """
    if not len(rows):
        return []
    of = reads.stored[rows]
    begins = offset_bytes[of] + reads.start[rows]
    stops = begins + reads.stop[rows] - reads.start[rows]
    heads: list[int] = []
    number = first = end = -1  # the file of the last group, and where in it the group begins and ends
    places = zip(file[of].tolist(), begins.tolist(), stops.tolist(), strict=True)
    for i, (name, begin, stop) in enumerate(places):
        is_near = name == number and begin - end <= NEAR_BYTES
        # Of one chunk, reads may overlap and so go back; a group never begins after its first read.
        if is_near and begin >= first and max(stop, end) - first <= most:
            end = max(stop, end)
        else:
            heads.append(i)
            number, first, end = name, begin, stop
    return np.split(rows, heads[1:])


def _cut(blocks: CompactCopies, itemsize: Ints, block_bytes: int) -> CompactCopies:
    """Cut blocks until what each spans in the file fits into one read and has no far gaps."""
    # Both ends are rounded to whole blocks, so a span may grow by nearly two blocks before it is read.
    room = READ_BYTES - 2 * block_bytes
    done: list[CompactCopies] = []
    while True:
        width = itemsize[blocks.stored]
        pitch = blocks.source_stride[:, 0] * width
        is_far = (blocks.ndim > 1) & (pitch - blocks.source_row_lengths() * width >= FAR_BYTES)
        rows = np.where(is_far, 1, np.maximum(room // np.maximum(pitch, 1), 1))
        is_contiguous = blocks.are_contiguous()
        # A run ends at the end of a block, so that no block is read twice.
        per_block = np.maximum(block_bytes // width, 1)
        rows = np.where(is_contiguous, np.maximum(rows // per_block, 1) * per_block, rows)
        before = np.where(is_contiguous, blocks.source % per_block, 0)
        is_long = ((blocks.source_lengths() * width > room) | is_far) & (before + blocks.shape[:, 0] > rows)
        done.append(blocks.take(~is_long))
        if not is_long.any():
            return CompactCopies.concatenate(done)
        blocks = _rows_of(blocks.take(is_long), rows[is_long], before[is_long])


def _rows_of(blocks: CompactCopies, rows: Ints, before: Ints) -> CompactCopies:
    """Cut blocks along their first dim, each into parts of so many rows.

    The first part is shorter by `before`.
    """
    extent = blocks.shape[:, 0]
    counts = -(-(extent + before) // rows)
    of = np.repeat(np.arange(len(blocks)), counts)
    edge = joined_ranges(0, counts) * rows[of] - before[of]
    at = np.maximum(edge, 0)
    taken = np.minimum(edge + rows[of], extent[of]) - at
    parts = blocks.take(of)
    parts.shape[:, 0] = taken
    parts = replace(
        parts,
        source=parts.source + at * parts.source_stride[:, 0],
        target=parts.target + at * parts.target_stride[:, 0],
    )
    for column, fill in ((parts.shape, 1), (parts.source_stride, 0), (parts.target_stride, 0)):
        column[taken == 1] = np.pad(column[taken == 1, 1:], ((0, 0), (0, 1)), constant_values=fill)
    return replace(parts, ndim=parts.ndim - (taken == 1))


def needed_ranges(
    copies: Sequence[StridedCopy], *, width: int, nbytes: int, block_bytes: int
) -> list[tuple[int, int]]:
    """Return the ranges of a part of a chunk that hold everything the copies take, in bytes, ascending.

    The part has nbytes and begins at a multiple of block_bytes in the chunk, its end too or at that of the
    chunk; so do the ranges. Sources are counted from its first element. What nobody takes is left out where
    it fills whole blocks; no byte is in two ranges.
    """
    grain = block_bytes if block_bytes > 1 else GRAIN_BYTES
    is_needed = np.zeros(-(-nbytes // grain), np.bool_)
    for copy in copies:
        _mark(is_needed, copy.source * width, copy.shape, copy.source_stride, width, grain)
    ends = np.flatnonzero(np.diff(is_needed, prepend=False, append=False))
    return [(a * grain, min(b * grain, nbytes)) for a, b in ends.reshape(-1, 2).tolist()]


def _mark(
    is_needed: npt.NDArray[np.bool_],
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    width: int,
    grain: int,
) -> None:
    inner = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) * width + width
    if len(shape) > 1 and stride[0] * width - inner >= grain:
        for row in range(shape[0]):
            _mark(is_needed, start + row * stride[0] * width, shape[1:], stride[1:], width, grain)
        return
    span = inner + ((shape[0] - 1) * stride[0] * width if shape else 0)
    is_needed[start // grain : -(-(start + span) // grain)] = True
