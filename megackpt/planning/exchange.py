"""The exchange plan: who reads which bytes of a checkpoint, who needs what of them, and when it is sent.

Pure: the requests of a group's ranks in, the same plan on each of them out. Direct loading needs none. Stored
chunks are cut into parts; a part is read once, by one rank, and delivered to every rank that asked for
elements of it. ChunkParts are exchanged in rounds, in each of which no rank holds more than a bounded number
of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints, joined_ranges
from megackpt.metadata import OBJECT, ChunkTable, DeclaredChunks, itemsizes
from megackpt.options import Exchange
from megackpt.planning.assignment import Readers, assign_readers
from megackpt.planning.completeness import exceed_arrays
from megackpt.planning.copies import Copies
from megackpt.planning.equal_requests import equal_requests, for_each_rank, merge_requests
from megackpt.planning.load_plan import plan_load
from megackpt.planning.overlaps import overlapping_chunks
from megackpt.planning.rounds import PartLoads, assign_rounds

PART_BYTES = 4 * 1024 * 1024
"""Upper bound of a part, unless a single block of the format is larger."""

PARTS_PER_RANK = 20
"""So many parts, or more, that one of them is at most 5 % of what a rank reads; as blocks allow."""

SMALL_BYTES = 64 * 1024
"""Lower bound of a part where the format could read less, and of what is sent on its own: what is shorter
goes into one batch with all else that is."""

ALIGNMENT = 64
"""Everything in a buffer begins at a multiple of this, so that it can be seen as elements of any dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkParts:
    """Parts of stored chunks, each of which is read once; one row a part.

    Attributes:
        chunk: row of the stored chunk, `[u]`.
        start: first byte in the chunk, a multiple of the block, `[u]`.
        stop: one past the last; such a multiple too, or the chunk's end, `[u]`.
        width: bytes per element, 1 for objects, `[u]`.
        reader: the rank of the group that reads it, `[u]`.
        round: when it is exchanged, `[u]`, ascending.
        offset: where it lies in the reader's buffer of that round, in bytes, `[u]`.
    """

    chunk: Ints
    start: Ints
    stop: Ints
    width: Ints
    reader: Ints
    round: Ints
    offset: Ints

    def __len__(self) -> int:
        return len(self.chunk)

    @property
    def nbytes(self) -> Ints:
        """Length of each, `[u]`."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Deliveries:
    """What one rank gets of one part; one row for each such pair, sorted by part and rank.

    Attributes:
        part: `[p]`.
        rank: the rank of the group that needs it, `[p]`.
        start: where what it needs begins in the part, in bytes, `[p]`.
        nbytes: how much is sent, `[p]`.
        is_dense: whether that is one range of the part; else the elements of the copies, one after the other,
            `[p]`.
        is_batched: whether it travels with others in one batch from the reader to the rank, `[p]`.
        offset: where in this batch, in bytes; 0 for others, `[p]`.
        first: its first copy; the last one is before the first of the next row, `[p + 1]`.
    """

    part: Ints
    rank: Ints
    start: Ints
    nbytes: Ints
    is_dense: npt.NDArray[np.bool_]
    is_batched: npt.NDArray[np.bool_]
    offset: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """Who reads what of a checkpoint, and who needs what of it.

    Attributes:
        mode: how it is sent.
        size: number of ranks in the group.
        parts: what is read.
        deliveries: who needs what of it.
        copies: where elements of a part go, sorted as `deliveries`: `stored` is the part, sources are counted
            from its first element, `entity` is the requester's.
        rounds: number of rounds.
    """

    mode: Exchange
    size: int
    parts: ChunkParts
    deliveries: Deliveries
    copies: Copies
    rounds: int

    def fingerprint(self) -> bytes:
        """Return a few bytes that are equal on ranks with equal plans."""
        digest = hashlib.blake2b(digest_size=8)
        for column in (
            self.parts.chunk,
            self.parts.start,
            self.parts.stop,
            self.parts.reader,
            self.parts.round,
        ):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.digest()

    def read_nbytes(self) -> Ints:
        """Bytes that each rank reads, `[size]`."""
        return np.bincount(self.parts.reader, self.parts.nbytes, minlength=self.size).astype(np.int64)


def plan_exchange(
    requested: Sequence[DeclaredChunks],
    stored: ChunkTable,
    *,
    place: Ints,
    block_bytes: int,
    mode: Exchange,
    buffer_bytes: int,
    where: str,
    readers: Readers | None = None,
) -> ExchangePlan:
    """Plan the load of a group.

    requested holds the declarations of each rank of the group, all of whose keys are among the stored arrays;
    stored and place are those of `Chunks`. buffer_bytes bounds what a rank holds for reading, sending and
    receiving together; where a block is larger, what one block needs. readers says who can read what; None
    where every rank can read all.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    size = len(requested)
    groups = equal_requests(requested)
    merged = merge_requests([requested[ranks[0]] for ranks in groups], stored)
    width = np.maximum(itemsizes(stored.arrays), 1)[stored.array] if len(stored) else stored.array
    dims = max(merged.table.dims, stored.dims)
    found = np.unique(overlapping_chunks(merged.table.padded_to(dims), stored.padded_to(dims))[1])
    numbered = replace(merged, entity=np.arange(len(merged), dtype=np.int64))
    if exceed_arrays(stored.take(found)):  # chunks overlap: cut only those that something is copied from
        found = np.unique(plan_load(numbered, stored, where=where).stored)
    bounds = _bounds(merged, stored.nbytes[found], mode, buffer_bytes, size)
    table, chunk, start = _cut(stored, found, width, bounds.part_bytes, block_bytes)
    copies = plan_load(numbered, table, where=where)
    is_object = np.array([a.dtype == OBJECT for a in stored.arrays], np.bool_)
    copies = _objects_as_bytes(copies, is_object[table.array], table.nbytes)
    group = merged.rank[copies.entity]
    copies = replace(copies, entity=merged.entity[copies.entity])
    copies, rank = for_each_rank(copies, group, groups)
    return _plan(stored, chunk, start, width, copies, rank, place, block_bytes, mode, size, bounds, readers)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bytes that a part may have, and that a rank may give and take in one round."""

    part_bytes: int
    give: int
    take: int


def _bounds(merged: DeclaredChunks, nbytes: Ints, mode: Exchange, buffer_bytes: int, size: int) -> _Bounds:
    """Share the buffers: while a round is sent and another received, the next one is read.

    So a rank holds twice what it gives in a round and once what it takes. nbytes are those of the chunks in
    question.
    """
    give, take = buffer_bytes // 4, buffer_bytes // 2
    if mode == "gather_object":
        give = take = 2**62
    elif mode == "two_stage":  # who gives, and only the first rank does, takes nothing
        largest = max(1, min(int(nbytes.max(initial=1)), int(merged.table.nbytes.max(initial=1))))
        give = take = min(buffer_bytes // 2, largest)
    elif mode == "gather_rounds":  # shorter ones are padded to the longest
        give = min(give, take // size)
    part_bytes = min(PART_BYTES, give, take // max(1, size - 1))
    if mode == "two_stage":
        part_bytes = min(PART_BYTES, give)
    else:  # small enough to be given out evenly
        part_bytes = min(part_bytes, int(nbytes.sum()) // (PARTS_PER_RANK * size))
    return _Bounds(max(part_bytes, SMALL_BYTES), give, take)


def _cut(
    stored: ChunkTable, rows: Ints, width: Ints, part_bytes: int, block_bytes: int
) -> tuple[ChunkTable, Ints, Ints]:
    """Cut chunks into parts of whole blocks and elements; returns them, their chunks and first bytes.

    A part is a flat range of its chunk's box, so it is a chunk like any other. Objects stay whole.
    """
    rows = rows[stored.nbytes[rows] > 0]
    nbytes, wide = stored.nbytes[rows], width[rows]
    block = np.lcm(min(block_bytes, 2**40), wide)
    step = np.maximum(block, part_bytes // block * block)
    is_object = np.array([a.dtype == OBJECT for a in stored.arrays], np.bool_)[stored.array[rows]]
    step = np.where(is_object | (step > nbytes), nbytes, step)
    counts = -(-nbytes // step)
    of = np.repeat(np.arange(len(rows)), counts)
    start = joined_ranges(0, counts) * step[of]
    stop = np.minimum(start + step[of], nbytes[of])
    chunk = rows[of]
    table = stored.take(chunk)
    flat_start = np.where(is_object[of], table.flat_start, table.flat_start + start // wide[of])
    flat_stop = np.where(is_object[of], table.flat_stop, table.flat_start + stop // wide[of])
    return replace(table, flat_start=flat_start, flat_stop=flat_stop, nbytes=stop - start), chunk, start


def _objects_as_bytes(copies: Copies, is_object: npt.NDArray[np.bool_], nbytes: Ints) -> Copies:
    """Let an object's copies move the bytes of its part, which are its one element."""
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
    columns["shape"][rows, -1] = nbytes[copies.stored[rows]]
    return replace(copies, **columns)


def _plan(
    stored: ChunkTable,
    chunk: Ints,
    start: Ints,
    width: Ints,
    copies: Copies,
    rank: Ints,
    place: Ints,
    block_bytes: int,
    mode: Exchange,
    size: int,
    bounds: _Bounds,
    readers: Readers | None,
) -> ExchangePlan:
    """Narrow parts to what is needed of them, choose readers and rounds, and put all in their order.

    copies and rank are sorted by part and rank.
    """
    needed, copies = _renumbered(copies)
    chunk, start = chunk[needed], start[needed]
    wide = width[chunk]
    low, high = _spans(copies)
    part_first = np.flatnonzero(np.diff(copies.stored, prepend=-1))
    lowest = _reduced(np.minimum, low, part_first) * wide
    highest = _reduced(np.maximum, high, part_first) * wide
    block = np.lcm(min(block_bytes, 2**40), wide)
    begin = (start + lowest) // block * block
    end = np.minimum(-(-(start + highest) // block) * block, stored.nbytes[chunk])
    shift = ((begin - start) // wide)[copies.stored]
    copies = replace(copies, source_first=copies.source_first - shift)

    pair_first = np.flatnonzero((np.diff(copies.stored, prepend=-1) != 0) | (np.diff(rank, prepend=-1) != 0))
    part, to = copies.stored[pair_first], rank[pair_first]
    holder_start = np.append(np.searchsorted(part, np.arange(len(chunk))), len(part))
    if mode == "two_stage":
        reader = np.zeros(len(chunk), np.int64)
    else:
        reader = assign_readers(end - begin, holder_start, to, chunk, readers=readers, ranks=size)
    deliveries = _deliveries(copies, pair_first, to, wide, low - shift, high - shift)
    parts = ChunkParts(chunk, begin, end, wide, reader, np.zeros_like(chunk), np.zeros_like(chunk))
    rounds = assign_rounds(
        _loads(parts, deliveries, holder_start, mode, size), order=np.lexsort((begin, place[chunk])),
        give=bounds.give, take=bounds.take,
    )  # fmt: skip
    order = np.lexsort((begin, place[chunk], reader, rounds))
    return _ordered(replace(parts, round=rounds), deliveries, copies, order, mode, size)


def _renumbered(copies: Copies) -> tuple[Ints, Copies]:
    """Number only the parts that something is copied from."""
    needed, number = np.unique(copies.stored, return_inverse=True)
    return needed, replace(copies, stored=number.reshape(-1).astype(np.int64))


def _spans(copies: Copies) -> tuple[Ints, Ints]:
    """First element and one past the last that each copy touches in its part."""
    return copies.source_first, copies.source_first + ((copies.shape - 1) * copies.source_stride).sum(
        axis=1
    ) + 1


def _reduced(function: np.ufunc, values: Ints, first: Ints) -> Ints:
    reduced: Ints = function.reduceat(values, first) if len(first) else np.zeros(0, np.int64)
    return reduced


def _deliveries(copies: Copies, first: Ints, rank: Ints, wide: Ints, low: Ints, high: Ints) -> Deliveries:
    """Say what each rank gets of each part: a range of it if most of that is needed, else packed elements."""
    part = copies.stored[first]
    lowest, highest = _reduced(np.minimum, low, first), _reduced(np.maximum, high, first)
    numel = _reduced(np.add, copies.shape.prod(axis=1), first)
    is_dense = numel >= highest - lowest
    nbytes = np.where(is_dense, highest - lowest, numel) * wide[part]
    return Deliveries(
        part=part,
        rank=rank,
        start=np.where(is_dense, lowest, 0) * wide[part],
        nbytes=nbytes,
        is_dense=is_dense,
        is_batched=~is_dense | (nbytes < SMALL_BYTES),
        offset=np.zeros_like(part),
        first=np.append(first, len(copies)),
    )


def _loads(
    parts: ChunkParts, deliveries: Deliveries, holder_start: Ints, mode: Exchange, size: int
) -> PartLoads:
    """What parts put on ranks: for the reader what it reads and packs, for the others what they take."""
    read = aligned(parts.nbytes)
    if mode != "all_to_all":  # everyone takes everything, so one taker stands for all
        anyone = np.zeros_like(parts.chunk)
        return PartLoads(parts.reader, read, np.arange(len(parts) + 1), anyone, read, size)
    is_sent = deliveries.rank != parts.reader[deliveries.part]
    sent = np.where(is_sent, aligned(deliveries.nbytes), 0)
    packed = np.bincount(deliveries.part, sent * deliveries.is_batched, minlength=len(parts)).astype(np.int64)
    return PartLoads(parts.reader, read + packed, holder_start, deliveries.rank, sent, size)


def _ordered(
    parts: ChunkParts, deliveries: Deliveries, copies: Copies, order: Ints, mode: Exchange, size: int
) -> ExchangePlan:
    """Put parts into their order, give everything its place in the buffers, and sort the rest accordingly."""
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    parts = ChunkParts(*(getattr(parts, name)[order] for name in ChunkParts.__slots__))
    parts = replace(parts, offset=_places(aligned(parts.nbytes), parts.round, parts.reader))
    part = number[deliveries.part]
    rows = np.lexsort((deliveries.rank, part))
    counts = np.diff(deliveries.first)[rows]
    begin = np.cumsum(counts) - counts
    within = np.arange(len(copies)) - np.repeat(begin, counts)
    copies = copies.take(np.repeat(deliveries.first[rows], counts) + within)
    part, rank = part[rows], deliveries.rank[rows]
    is_batched, nbytes = deliveries.is_batched[rows], deliveries.nbytes[rows]
    offset = np.zeros(len(rows), np.int64)
    small = np.flatnonzero(is_batched)
    by_batch = small[np.lexsort((rank[small], parts.reader[part[small]], parts.round[part[small]]))]
    of = part[by_batch]
    offset[by_batch] = _places(aligned(nbytes[by_batch]), parts.round[of], parts.reader[of], rank[by_batch])
    return ExchangePlan(
        mode=mode,
        size=size,
        parts=parts,
        deliveries=Deliveries(
            part, rank, deliveries.start[rows], nbytes, deliveries.is_dense[rows], is_batched, offset,
            np.append(begin, len(copies)),
        ),
        copies=replace(copies, stored=np.repeat(part, counts)),
        rounds=int(parts.round.max(initial=-1)) + 1,
    )  # fmt: skip


def _places(nbytes: Ints, *groups: Ints) -> Ints:
    """Offsets of rows that lie one after the other in each buffer; rows of one buffer are neighbours."""
    ends = np.cumsum(nbytes)
    begins_anew = np.zeros(len(nbytes), np.bool_)
    for column in groups:
        begins_anew |= np.diff(column, prepend=-1) != 0
    base = np.maximum.accumulate(np.where(begins_anew, ends - nbytes, 0)) if len(nbytes) else ends
    places: Ints = ends - nbytes - base
    return places


def aligned(nbytes: Ints) -> Ints:
    """Lengths up to where the next thing in a buffer may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
