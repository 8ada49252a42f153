"""The plan of an exchange, as data: parts of chunks that are read, and what each rank receives of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints
from megackpt.plans.planning.copies import Copies

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
