"""Planning an exchange: which rank reads each part of a chunk, and when it is sent to which ranks.

Pure: every rank of a group makes the same plan from the requests of all. A direct load has no such plan.
Stored chunks are cut into parts. A part is read once, by one rank, and delivered to every rank that requested
elements of it. Parts are exchanged in rounds, in each of which a rank buffers a bounded number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.planning.completeness import exceed_arrays
from megackpt.plans.planning.copies import Copies
from megackpt.plans.planning.exchange_plan import (
    BufferSizes,
    ChunkParts,
    Deliveries,
    ExchangePlan,
    Readers,
    aligned,
    assign_readers,
    assign_rounds,
    equal_requests,
    for_each_rank,
    merge_requests,
)
from megackpt.plans.planning.load_plan import overlapping_chunks, plan_load

PART_BYTES = 4 * 1024 * 1024
"""The longest part, unless a block of the format is longer."""

PARTS_PER_RANK = 20
"""The least number of parts per rank, if blocks are short enough: one part is 5 % of what a rank reads."""

SMALL_BYTES = 64 * 1024
"""The shortest part, even if the format can read less. A delivery that is shorter is sent in a batch with all
other short ones between the same two ranks."""


def plan_exchange(
    requested: Sequence[DeclaredChunks],
    stored: ChunkTable,
    *,
    position: Ints,
    block_bytes: int,
    has_one_reader: bool,
    buffer_bytes: int,
    where: str,
    readers: Readers | None = None,
) -> ExchangePlan:
    """Plan the load of a group of ranks.

    Args:
        requested: the request of each rank, all of whose keys are among the stored arrays.
        stored: the stored chunks.
        position: one number for each stored chunk, in whose order reading is cheap.
        block_bytes: parts begin and end at multiples of this in their chunk.
        has_one_reader: the first rank reads all parts and broadcasts them; otherwise ranks share the reads,
            and send each rank what it needs.
        buffer_bytes: what a rank may buffer for reading, sending and receiving; a longer block needs more.
        where: the checkpoint, for errors.
        readers: which ranks can read which chunks; None if every rank can read all.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    size = len(requested)
    # Plan once for each group of ranks with equal requests.
    groups = equal_requests(requested)
    merged = merge_requests([requested[ranks[0]] for ranks in groups], stored)
    width = np.maximum(stored.widths(), 1)
    # For now `entity` is the row of the merged requests, which tells the group and the entity.
    numbered = replace(merged, entity=np.arange(len(merged), dtype=np.int64))
    chunks = _chunks_to_read(numbered, stored, where)
    bounds = _bounds(merged, stored.nbytes[chunks], has_one_reader, buffer_bytes, size)
    # Parts are chunks as well, so a load is planned from them as from stored chunks.
    table, parts = _cut(stored, chunks, width, bounds.part_bytes, block_bytes)
    copies = plan_load(numbered, table, where=where)
    copies = _objects_as_bytes(copies, table.are_objects(), table.nbytes)
    group = merged.rank[copies.entity]
    copies = replace(copies, entity=merged.entity[copies.entity])
    copies, rank = for_each_rank(copies, group, groups)  # sorted by part and rank
    parts, copies = _narrowed(parts, copies, stored.nbytes, block_bytes)
    deliveries = _deliveries(copies, rank, parts.width)

    parts = _with_readers_and_rounds(parts, deliveries, position, bounds, has_one_reader, size, readers)
    # Each reader reads the parts of a round in the cheapest order.
    order = np.lexsort((parts.start, position[parts.chunk], parts.reader, parts.round))
    return _ordered(parts, deliveries, copies, order, has_one_reader, size)


def _chunks_to_read(requested: DeclaredChunks, stored: ChunkTable, where: str) -> Ints:
    """Return the rows of the stored chunks that something is copied from."""
    dims = max(requested.table.dims, stored.dims)
    chunks = np.unique(overlapping_chunks(requested.table.padded_to(dims), stored.padded_to(dims))[1])
    if exceed_arrays(stored.take(chunks)):  # chunks overlap, so not all of them are needed
        chunks = np.unique(plan_load(requested, stored, where=where).stored)
    return chunks


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The most bytes of one part, and the most bytes that a rank sends and receives in one round."""

    part_bytes: int
    sent: int
    received: int


def _bounds(
    merged: DeclaredChunks, nbytes: Ints, has_one_reader: bool, buffer_bytes: int, size: int
) -> _Bounds:
    """Divide the buffers between sending and receiving; nbytes are the lengths of the chunks to be read.

    While one round is sent and received, the next one is read. So a rank buffers twice what it sends in a
    round, and once what it receives.
    """
    if has_one_reader:  # only the first rank reads and sends, and it receives nothing
        largest = max(1, min(int(nbytes.max(initial=1)), int(merged.table.nbytes.max(initial=1))))
        sent = received = min(buffer_bytes // 2, largest)
        part_bytes = min(PART_BYTES, sent)
    else:
        sent, received = buffer_bytes // 4, buffer_bytes // 2
        # In one round a rank has room for one part of each other rank.
        longest = min(PART_BYTES, sent, received // max(1, size - 1))
        # Parts are short enough to balance the readers.
        part_bytes = min(longest, int(nbytes.sum()) // (PARTS_PER_RANK * size))
    return _Bounds(max(part_bytes, SMALL_BYTES), sent, received)


def _cut(
    stored: ChunkTable, rows: Ints, width: Ints, part_bytes: int, block_bytes: int
) -> tuple[ChunkTable, ChunkParts]:
    """Cut chunks into parts of whole blocks and elements; return the parts as chunks, and without readers.

    A part is a flat range of its chunk's box, so it has the form of a chunk. Objects stay whole.
    """
    rows = rows[stored.nbytes[rows] > 0]
    nbytes, wide = stored.nbytes[rows], width[rows]
    # The shortest stretch of whole blocks and whole elements; a part has a multiple of it.
    block = np.lcm(min(block_bytes, 2**40), wide)
    step = np.maximum(block, part_bytes // block * block)
    is_object = stored.are_objects()[rows]
    step = np.where(is_object | (step > nbytes), nbytes, step)
    # Chunks without bytes are left out and a step is at most a chunk, so a chunk has at least one part.
    counts = -(-nbytes // step)
    of = np.repeat(np.arange(len(rows)), counts)
    start = joined_ranges(0, counts) * step[of]
    stop = np.minimum(start + step[of], nbytes[of])
    chunk = rows[of]
    table = stored.take(chunk)
    flat_start = np.where(is_object[of], table.flat_start, table.flat_start + start // wide[of])
    flat_stop = np.where(is_object[of], table.flat_stop, table.flat_start + stop // wide[of])
    table = replace(table, flat_start=flat_start, flat_stop=flat_stop, nbytes=stop - start)
    unknown = np.zeros_like(chunk)  # readers, rounds and offsets are assigned later
    return table, ChunkParts(chunk, start, stop, wide[of], unknown, unknown, unknown)


def _objects_as_bytes(copies: Copies, is_object: npt.NDArray[np.bool_], nbytes: Ints) -> Copies:
    """Let the copies of an object move the bytes of its part; as an array it has one element."""
    rows = np.flatnonzero(is_object[copies.stored])
    if not rows.size:
        return copies
    columns = {
        "shape": copies.shape,
        "source_first": copies.source_first,
        "source_stride": copies.source_stride,
        "target_first": copies.target_first,
        "target_stride": copies.target_stride,
    }
    columns = {name: column.copy() for name, column in columns.items()}
    for name, column in columns.items():
        column[rows] = 0 if name.endswith("first") else 1
    # A box with the bytes along its last dim, from the first byte on, on both sides.
    columns["shape"][rows, -1] = nbytes[copies.stored[rows]]
    return replace(copies, **columns)


def _narrowed(
    parts: ChunkParts, copies: Copies, chunk_nbytes: Ints, block_bytes: int
) -> tuple[ChunkParts, Copies]:
    """Drop parts that nothing is copied from, and the blocks at both ends of the others that nobody needs.

    Args:
        parts: the parts, without readers.
        copies: the copies from them, sorted by part.
        chunk_nbytes: length of each stored chunk, `[n]`.
        block_bytes: parts begin and end at multiples of this in their chunk.
    """
    needed, number = np.unique(copies.stored, return_inverse=True)
    parts = _take(parts, needed)
    part = number.reshape(-1).astype(np.int64)
    low, high = _source_ranges(copies)
    # The copies of a part are neighbours, so minima and maxima over them are the range that is needed.
    first = np.flatnonzero(np.diff(part, prepend=-1))
    lowest = _reduced(np.minimum, low, first) * parts.width
    highest = _reduced(np.maximum, high, first) * parts.width
    block = np.lcm(min(block_bytes, 2**40), parts.width)
    start = (parts.start + lowest) // block * block
    stop = np.minimum(-(-(parts.start + highest) // block) * block, chunk_nbytes[parts.chunk])
    # Sources count from the part's first element, which may have moved.
    shift = ((start - parts.start) // parts.width)[part]
    copies = replace(copies, stored=part, source_first=copies.source_first - shift)
    return replace(parts, start=start, stop=stop), copies


def _take(parts: ChunkParts, rows: Ints) -> ChunkParts:
    """Return the chosen parts, in the order of rows."""
    return ChunkParts(*(getattr(parts, name)[rows] for name in ChunkParts.__slots__))


def _source_ranges(copies: Copies) -> tuple[Ints, Ints]:
    """Return the first element and one past the last that each copy reads in its part."""
    last = copies.source_first + ((copies.shape - 1) * copies.source_stride).sum(axis=1)
    return copies.source_first, last + 1


def _reduced(function: np.ufunc, values: Ints, first: Ints) -> Ints:
    reduced: Ints = function.reduceat(values, first) if len(first) else np.zeros(0, np.int64)
    return reduced


def _deliveries(copies: Copies, rank: Ints, width: Ints) -> Deliveries:
    """Return what each rank receives of each part: one range if all of it is needed, else packed elements.

    Args:
        copies: all copies, sorted by part and rank.
        rank: the rank of each copy.
        width: bytes per element of each part.
    """
    # One delivery for each pair of a part and a rank: its copies are neighbours.
    first = np.flatnonzero((np.diff(copies.stored, prepend=-1) != 0) | (np.diff(rank, prepend=-1) != 0))
    part, rank, wide = copies.stored[first], rank[first], width[copies.stored[first]]
    low, high = _source_ranges(copies)
    lowest, highest = _reduced(np.minimum, low, first), _reduced(np.maximum, high, first)
    numel = _reduced(np.add, copies.shape.prod(axis=1), first)
    # If all elements of a range are needed, it is sent as it was read. Otherwise the needed ones are packed.
    is_dense = numel >= highest - lowest
    nbytes = np.where(is_dense, highest - lowest, numel) * wide
    return Deliveries(
        part=part,
        rank=rank,
        start=np.where(is_dense, lowest, 0) * wide,
        nbytes=nbytes,
        is_dense=is_dense,
        is_batched=~is_dense | (nbytes < SMALL_BYTES),
        offset=np.zeros_like(part),
        first=np.append(first, len(copies)),
    )


def _buffer_sizes(
    parts: ChunkParts, deliveries: Deliveries, rank_start: Ints, has_one_reader: bool, size: int
) -> BufferSizes:
    """Return what ranks buffer for parts: readers what they read and pack, the others what they receive."""
    read = aligned(parts.nbytes)
    if has_one_reader:  # every rank receives everything, so one receiver stands for all
        any_rank = np.zeros_like(parts.chunk)
        return BufferSizes(parts.reader, read, np.arange(len(parts) + 1), any_rank, read, size)
    is_sent = deliveries.rank != parts.reader[deliveries.part]
    sent = np.where(is_sent, aligned(deliveries.nbytes), 0)
    packed = np.bincount(deliveries.part, sent * deliveries.is_batched, minlength=len(parts)).astype(np.int64)
    return BufferSizes(parts.reader, read + packed, rank_start, deliveries.rank, sent, size)


def _with_readers_and_rounds(
    parts: ChunkParts,
    deliveries: Deliveries,
    position: Ints,
    bounds: _Bounds,
    has_one_reader: bool,
    size: int,
    readers: Readers | None,
) -> ChunkParts:
    """Choose the rank that reads each part, and the round that sends it."""
    rank_start = np.searchsorted(deliveries.part, np.arange(len(parts) + 1))
    if has_one_reader:
        reader = np.zeros(len(parts), np.int64)
    else:
        reader = assign_readers(
            parts.nbytes, rank_start, deliveries.rank, parts.chunk, readers=readers, ranks=size
        )
    parts = replace(parts, reader=reader)
    rounds = assign_rounds(
        _buffer_sizes(parts, deliveries, rank_start, has_one_reader, size),
        order=np.lexsort((parts.start, position[parts.chunk])),
        most_sent=bounds.sent,
        most_received=bounds.received,
    )
    return replace(parts, round=rounds)


def _ordered(
    parts: ChunkParts,
    deliveries: Deliveries,
    copies: Copies,
    order: Ints,
    has_one_reader: bool,
    size: int,
) -> ExchangePlan:
    """Sort parts, then deliveries by part and rank, then copies by delivery; compute offsets in buffers."""
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    # After this, the parts of one reader and round are neighbours: they lie in one buffer.
    parts = _take(parts, order)
    parts = replace(parts, offset=_offsets(aligned(parts.nbytes), parts.round, parts.reader))
    part = number[deliveries.part]
    rows = np.lexsort((deliveries.rank, part))
    # The copies of a delivery stay together.
    counts = np.diff(deliveries.first)[rows]
    copies = copies.take(joined_ranges(deliveries.first[rows], counts))
    part, rank = part[rows], deliveries.rank[rows]
    is_batched, nbytes = deliveries.is_batched[rows], deliveries.nbytes[rows]
    # A batch holds the short deliveries of one round from one reader to one rank.
    offset = np.zeros(len(rows), np.int64)
    short = np.flatnonzero(is_batched)
    by_batch = short[np.lexsort((rank[short], parts.reader[part[short]], parts.round[part[short]]))]
    of = part[by_batch]
    offset[by_batch] = _offsets(aligned(nbytes[by_batch]), parts.round[of], parts.reader[of], rank[by_batch])
    return ExchangePlan(
        has_one_reader=has_one_reader,
        size=size,
        parts=parts,
        deliveries=Deliveries(
            part, rank, deliveries.start[rows], nbytes, deliveries.is_dense[rows], is_batched, offset,
            np.append(0, np.cumsum(counts)),
        ),
        copies=replace(copies, stored=np.repeat(part, counts)),
        rounds=int(parts.round.max(initial=-1)) + 1,
    )  # fmt: skip


def _offsets(nbytes: Ints, *buffers: Ints) -> Ints:
    """Return the offsets of rows that lie one after the other in each buffer.

    The columns `buffers` name the buffer of each row; the rows of a buffer are neighbours.
    """
    ends = np.cumsum(nbytes)
    begins_buffer = np.zeros(len(nbytes), np.bool_)
    for column in buffers:
        begins_buffer |= np.diff(column, prepend=-1) != 0
    # Sums over all buffers, minus what they were where the row's buffer began.
    base = np.maximum.accumulate(np.where(begins_buffer, ends - nbytes, 0)) if len(nbytes) else ends
    offsets: Ints = ends - nbytes - base
    return offsets
