"""The read plan: copies grouped into reads of bounded size.

Pure. Where digests cover fixed blocks of a chunk, a read is a whole number of blocks: every byte that is
copied is checked. Copies that reach far are cut first, at block ends where both sides are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.metadata import DIGEST_BLOCK_BYTES, ChunkTable, itemsizes
from megackpt.planning.load_plan import Copies

READ_BYTES = 15 * DIGEST_BLOCK_BYTES
"""Upper bound of one read. A whole number of blocks that fits into the buffers of a store."""

NEAR_BYTES = 64 * 1024
"""Reads in one file this near to each other are one request: to ask again costs more than so many bytes."""

FAR_BYTES = 2 * DIGEST_BLOCK_BYTES
"""Rows of a block this far apart in a file are read one by one; nearer ones with what lies between."""

GRAIN_BYTES = 64 * 1024
"""Where a format can read any byte: gaps that are shorter are read with what lies around them."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One strided block; numbers in elements, dims of extent 1 left out and contiguous ones joined.

    Attributes:
        slot: the requester's entity.
        shape: extents.
        source: first element in the stored chunk.
        source_stride: strides there.
        target: first element in the memory of the entity's tensor.
        target_stride: strides there.
    """

    slot: int
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


@dataclass(frozen=True, slots=True)
class Read:
    """A range of one stored chunk and what is copied out of it.

    Attributes:
        stored: row of the chunk.
        start: first byte in the chunk; a multiple of the block.
        stop: one past the last; such a multiple too, or the chunk's end.
        copies: what to copy, sources counted from the chunk's first element.
    """

    stored: int
    start: int
    stop: int
    copies: tuple[BlockCopy, ...]


def plan_reads(copies: Copies, table: ChunkTable, *, place: Ints, block_bytes: int) -> list[Read]:
    """Group copies into reads, sorted by place.

    table holds the stored chunks and place one number for each, in whose order they are best read. A read
    begins and ends at multiples of block_bytes in its chunk, or at the chunk's end.
    """
    itemsize = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
    order = np.lexsort((copies.source_first, place[copies.stored]))
    reads: list[Read] = []
    for i in order.tolist():
        row = int(copies.stored[i])
        width, nbytes = int(itemsize[row]), int(table.nbytes[row])
        for piece in _bounded(block_copy(copies, i), width, block_bytes):
            start = piece.source * width // block_bytes * block_bytes
            stop = min(-(-piece.source_stop * width // block_bytes) * block_bytes, nbytes)
            last = reads[-1] if reads else None
            joined = (min(start, last.start), max(stop, last.stop)) if last and last.stored == row else None
            # Copies of one chunk are sorted by their first elements, but a cut one may reach far beyond the
            # next.
            if (
                last
                and joined
                and start < last.stop
                and last.start < stop
                and joined[1] - joined[0] <= READ_BYTES
            ):
                reads[-1] = Read(row, *joined, (*last.copies, piece))
            else:
                reads.append(Read(row, start, stop, (piece,)))
    return reads


def group_reads(reads: Sequence[Read], file: Ints, offset_bytes: Ints, *, most: int) -> list[list[Read]]:
    """Group reads, sorted by place, that lie near each other in one file; a group spans at most `most` bytes.

    file and offset_bytes say where each chunk lies, `[n]`.
    """
    groups: list[list[Read]] = []
    first = end = 0  # of the last group, in its file
    for read in reads:
        begin = int(offset_bytes[read.stored]) + read.start
        stop = begin + read.stop - read.start
        last = groups[-1][-1] if groups else None
        is_near = last is not None and file[last.stored] == file[read.stored] and begin - end <= NEAR_BYTES
        # Of one chunk, reads may overlap and so go back; a group never begins after its first read.
        if is_near and begin >= first and max(stop, end) - first <= most:
            groups[-1].append(read)
            end = max(stop, end)
        else:
            groups.append([read])
            first, end = begin, stop
    return groups


def block_copy(copies: Copies, i: int) -> BlockCopy:
    """Return copy i, dims joined that are contiguous with the next on both sides."""
    dims: list[tuple[int, int, int]] = []  # (extent, source stride, target stride)
    rows = zip(
        copies.shape[i].tolist(),
        copies.source_stride[i].tolist(),
        copies.target_stride[i].tolist(),
        strict=True,
    )
    for extent, source, target in rows:
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * source and dims[-1][2] == extent * target:
            dims[-1] = (dims[-1][0] * extent, source, target)
        else:
            dims.append((extent, source, target))
    return BlockCopy(
        int(copies.slot[i]),
        tuple(d[0] for d in dims),
        int(copies.source_first[i]),
        tuple(d[1] for d in dims),
        int(copies.target_first[i]),
        tuple(d[2] for d in dims),
    )


def _bounded(copy: BlockCopy, width: int, block_bytes: int) -> Iterator[BlockCopy]:
    """Cut a copy until what it spans in the file fits into one read and has no far gaps."""
    span = (copy.source_stop - copy.source) * width
    if not copy.shape:
        yield copy
        return
    stride = copy.source_stride[0]
    inner = (span - (copy.shape[0] - 1) * stride * width) if len(copy.shape) > 1 else width
    far = len(copy.shape) > 1 and stride * width - inner >= FAR_BYTES
    # Both ends are rounded to whole blocks, so a span may grow by nearly two blocks before it is read.
    room = READ_BYTES - 2 * block_bytes
    if span <= room and not far:
        yield copy
        return
    rows = 1 if far else max(1, room // (stride * width))
    at = 0
    while at < copy.shape[0]:
        stop = at + rows
        if copy.is_run:  # end at the end of a block, so that no block is read twice
            per_block = max(1, block_bytes // width)
            stop = (copy.source + at + rows) // per_block * per_block - copy.source
        taken = min(stop, copy.shape[0]) - at
        piece = replace(
            copy,
            shape=(taken, *copy.shape[1:]) if taken > 1 else copy.shape[1:],
            source=copy.source + at * copy.source_stride[0],
            source_stride=copy.source_stride if taken > 1 else copy.source_stride[1:],
            target=copy.target + at * copy.target_stride[0],
            target_stride=copy.target_stride if taken > 1 else copy.target_stride[1:],
        )
        yield from _bounded(piece, width, block_bytes)
        at += taken


def needed_ranges(
    copies: Sequence[BlockCopy], *, width: int, nbytes: int, block_bytes: int
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
