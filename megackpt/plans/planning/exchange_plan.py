"""The plan of an exchange, as data: parts of chunks that are read, and what each rank receives of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.planning.assignment import assign_writers
from megackpt.plans.planning.copies import Copies, StridedCopy

ALIGNMENT = 64
"""Everything in a buffer begins at a multiple of this, so that it can be viewed as elements of any dtype."""


def aligned(nbytes: Ints) -> Ints:
    """Return lengths rounded up to where the next thing in a buffer may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class ChunkParts:
    """Parts of stored chunks. Each part is read once, and has one row.

    Attributes:
        chunk: row of the stored chunk, `[p]`.
        start: first byte in the chunk, a multiple of the block, `[p]`.
        stop: one past the last byte: also such a multiple, or the end of the chunk, `[p]`.
        width: bytes per element, 1 for objects, `[p]`.
        reader: the rank of the group that reads it, `[p]`.
        round: the round in which it is exchanged, `[p]`, ascending.
        offset: offset in the reader's buffer of that round, in bytes, `[p]`.
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
        """Length of each part in bytes, `[p]`."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Deliveries:
    """What one rank receives of one part, one row for each such pair, sorted by part and rank.

    Attributes:
        part: row in `ChunkParts`, `[d]`.
        rank: the rank of the group that needs it, `[d]`.
        start: first needed byte in the part, `[d]`.
        nbytes: how much is sent, `[d]`.
        is_dense: whether one range of the part is sent; otherwise the elements of the copies are packed one
            after the other, `[d]`.
        is_batched: whether it is sent in one batch with other deliveries from the reader to the rank, `[d]`.
        offset: offset in that batch, in bytes; 0 for deliveries that are not batched, `[d]`.
        first: the first copy of each delivery, and the number of all copies, `[d + 1]`.
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
    """Which rank reads which parts of a checkpoint, and which ranks receive what of them.

    Attributes:
        has_one_reader: rank 0 reads all parts and broadcasts them; otherwise ranks share the reads, and each
            receives what it needs.
        size: number of ranks in the group.
        parts: what is read.
        deliveries: what is sent, and what a rank needs of its own parts.
        copies: where the elements of a delivery go, sorted as `deliveries`: `stored` is the part, sources
            count from its first element, `entity` is that of the requesting rank.
        rounds: number of rounds.
    """

    has_one_reader: bool
    size: int
    parts: ChunkParts
    deliveries: Deliveries
    copies: Copies
    rounds: int

    def fingerprint(self) -> bytes:
        """Return 8 bytes that are equal on ranks with equal plans."""
        # Deliveries and copies follow from the parts and from what every rank has asked for.
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
        """Return the bytes that each rank reads, `[size]`."""
        return np.bincount(self.parts.reader, self.parts.nbytes, minlength=self.size).astype(np.int64)


# Equal requests, such as those of data-parallel replicas, so that they are planned only once. Pure.


def equal_requests(requested: Sequence[DeclaredChunks]) -> list[list[int]]:
    """Group ranks by their requests: the ranks of a group request the same chunks of the same arrays."""
    groups: dict[tuple[object, ...], list[int]] = {}
    digests: dict[int, bytes] = {}
    for rank, declared in enumerate(requested):
        arrays = declared.table.arrays
        if id(arrays) not in digests:  # ranks with equal lists of arrays share one tuple
            digests[id(arrays)] = hashlib.blake2b(repr(arrays).encode()).digest()
        # The rank is in neither digest: two ranks that ask for the same are one group.
        groups.setdefault((digests[id(arrays)], _digest_of_rows(declared)), []).append(rank)
    return list(groups.values())


def _digest_of_rows(declared: DeclaredChunks) -> bytes:
    """Return a digest of everything that a plan uses of a request, except its arrays."""
    table = declared.table
    digest = hashlib.blake2b()
    digest.update(repr(table.start.shape).encode())
    for column in (
        table.array,
        table.start,
        table.shape,
        table.flat_start,
        table.flat_stop,
        table.nbytes,
        declared.resizable,
        declared.entity,
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def for_each_rank(copies: Copies, group: Ints, groups: list[list[int]]) -> tuple[Copies, Ints]:
    """Repeat the copies of a group for each of its ranks; returns copies and ranks, sorted by part and rank.

    Args:
        copies: what was planned for the groups; `stored` is the part of a chunk.
        group: the group of each copy.
        groups: the ranks of each group.
    """
    counts = np.array([len(ranks) for ranks in groups], np.int64)
    first = np.cumsum(counts) - counts
    # Each copy stands once for every rank of its group: `within` counts these ranks from 0.
    row = np.repeat(np.arange(len(copies)), counts[group])
    within = joined_ranges(0, counts[group])
    rank = np.array([rank for ranks in groups for rank in ranks], np.int64)[first[group[row]] + within]
    order = np.lexsort((rank, copies.stored[row]))
    return copies.take(row[order]), rank[order]


def merge_requests(requested: Sequence[DeclaredChunks], stored: ChunkTable) -> DeclaredChunks:
    """Merge requests into one table, with the dtypes and global shapes of the stored arrays.

    Whether they may differ was decided before, by `check_dtypes_and_shapes`.
    """
    specs = {spec.key: spec for spec in stored.arrays}

    def as_stored(declared: DeclaredChunks, rank: int) -> DeclaredChunks:
        arrays = tuple(specs[a.key] for a in declared.table.arrays)
        table = replace(declared.table, arrays=arrays)
        return replace(declared, table=table, rank=np.full(len(table), rank, np.int64))

    return merge_declarations([as_stored(declared, rank) for rank, declared in enumerate(requested)])


# Reading the parts of an exchange: the rank that reads each, and which of its bytes are needed. Pure.

GRAIN_BYTES = 64 * 1024
"""If a format can read any byte, shorter gaps are read together with the bytes around them."""


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Which ranks can read which stored chunks, where not every rank can read all.

    Attributes:
        of: number of the set of ranks that can read each stored chunk, `[n]`.
        first: where each set begins in ranks, `[sets + 1]`.
        ranks: the ranks, ascending in each set; no set is empty.
    """

    of: Ints
    first: Ints
    ranks: Ints


def assign_readers(
    nbytes: Ints, first: Ints, needing: Ints, chunk: Ints, *, readers: Readers | None, ranks: int
) -> Ints:
    """Choose the rank that reads each part of a chunk, keeping bytes per rank even, `[p]`.

    A rank that needs the part reads it, which spares sending it there. If none of these can, another one that
    can does.

    Args:
        nbytes: length of each part, `[p]`.
        first: where the ranks that need each part begin in needing, `[p + 1]`.
        needing: ranks, ascending for each part.
        chunk: the stored chunk of each part, `[p]`.
        readers: which ranks can read which chunks; None if all can read all.
        ranks: number of ranks.
    """
    if readers is None:
        return needing[assign_writers(nbytes, first, needing, ranks=ranks)]
    # Of the ranks that need a part, find those that can read it, by numbers that stand for (set, rank).
    set_of = readers.of[chunk]
    part = np.repeat(np.arange(len(chunk)), np.diff(first))
    sets = np.repeat(np.arange(len(readers.first) - 1), np.diff(readers.first))
    can_read = np.isin(set_of[part] * ranks + needing, sets * ranks + readers.ranks)
    # Parts without such a rank have all ranks of their set as candidates instead.
    needing_readers = np.bincount(part[can_read], minlength=len(chunk))
    far = np.flatnonzero(needing_readers == 0)
    counts = np.diff(readers.first)[set_of[far]]
    from_sets = joined_ranges(readers.first[set_of[far]], counts)
    parts = np.concatenate([part[can_read], np.repeat(far, counts)])
    candidates = np.concatenate([needing[can_read], readers.ranks[from_sets]])
    candidates = candidates[np.argsort(parts, kind="stable")]
    start = np.append(0, np.cumsum(np.bincount(parts, minlength=len(chunk))))
    return candidates[assign_writers(nbytes, start, candidates, ranks=ranks)]


def needed_ranges(
    copies: Sequence[StridedCopy], *, width: int, nbytes: int, block_bytes: int
) -> list[tuple[int, int]]:
    """Return the byte ranges of a part of a chunk that the copies need, ascending and disjoint.

    Blocks that no copy needs are left out.

    Args:
        copies: their sources count from the first element of the part.
        width: bytes per element.
        nbytes: length of the part, which begins at a multiple of block_bytes in its chunk.
        block_bytes: ranges begin and end at multiples of this, or at the end of the part.
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
    # Rows with gaps of whole blocks between them are marked one by one; otherwise everything up to the last
    # row.
    inner = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) * width + width
    if len(shape) > 1 and stride[0] * width - inner >= grain:
        for row in range(shape[0]):
            _mark(is_needed, start + row * stride[0] * width, shape[1:], stride[1:], width, grain)
        return
    length = inner + ((shape[0] - 1) * stride[0] * width if shape else 0)
    is_needed[start // grain : -(-(start + length) // grain)] = True


# Rounds of an exchange: which parts of chunks are sent in one round, so that no rank buffers too much.
#
# Pure and greedy: in each round readers take turns, and each adds its next parts as long as they fit.


@dataclass(frozen=True, slots=True, eq=False)
class BufferSizes:
    """Bytes that ranks buffer for each of p parts.

    Attributes:
        reader: the rank that reads each part, `[p]`.
        reader_nbytes: what it buffers for the part, `[p]`.
        first: where the receivers of each part begin, `[p + 1]`.
        receiver: ranks that receive something of a part, `[r]`.
        receiver_nbytes: what each of these buffers for the part, `[r]`.
        ranks: number of ranks.
    """

    reader: Ints
    reader_nbytes: Ints
    first: Ints
    receiver: Ints
    receiver_nbytes: Ints
    ranks: int


def assign_rounds(sizes: BufferSizes, *, order: Ints, most_sent: int, most_received: int) -> Ints:
    """Return the round of each part, `[p]`; the parts of a reader are exchanged in the given order.

    In one round no reader buffers more than `most_sent` bytes, and no rank receives more than
    `most_received`. A single part may exceed either.
    """
    rounds = np.zeros(len(sizes.reader), np.int64)
    # The next part of a reader is the last of its queue.
    queues: list[list[int]] = [[] for _ in range(sizes.ranks)]
    for part in order[::-1].tolist():
        queues[int(sizes.reader[part])].append(part)
    reader_nbytes, first = sizes.reader_nbytes.tolist(), sizes.first.tolist()
    number = 0
    while any(queues):
        received = np.zeros(sizes.ranks, np.int64)
        for turn in range(sizes.ranks):  # another rank begins each round, so that none is always last
            queue = queues[(number + turn) % sizes.ranks]
            sent = 0
            while queue:
                part = queue[-1]
                # A part is sent to all of its receivers in one round, so it waits for the fullest of them.
                rows = slice(first[part], first[part + 1])
                receivers = sizes.receiver[rows]
                before = received[receivers]
                after = before + sizes.receiver_nbytes[rows]
                too_much_sent = sent and sent + reader_nbytes[part] > most_sent
                # A rank that has received nothing yet may take one part of any size.
                if too_much_sent or bool(((after > most_received) & (before > 0)).any()):
                    break
                received[receivers] = after
                sent += reader_nbytes[part]
                rounds[part] = number
                queue.pop()
        number += 1
    return rounds
