"""What a checkpoint holds: the chunk table with the file, offset and digests of every chunk.

This is the decoded index. Its encoding on disk belongs to the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.metadata.chunk_table import ChunkTable, Rows

DIGEST_BLOCK_BYTES = 256 * 1024
"""Bytes of a chunk under one digest. Small enough that a resharded read, which must read whole blocks to
check them, reads little more than it needs; large enough that the index stays under 100 bytes a chunk for
ordinary chunks, and that hashing releases the interpreter's lock."""

_DIGEST_BLOCK_BITS = DIGEST_BLOCK_BYTES.bit_length() - 1


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """Chunks in files.

    Attributes:
        table: the chunks, sorted by array, start and flat range.
        file: index into `files`, `[n]`.
        offset_bytes: where the chunk begins in its file, `[n]`.
        digest_start: where its block digests begin in `digests`, `[n]`.
        digests: xxh3-64 of each block of `DIGEST_BLOCK_BYTES` of each chunk, the last block shorter; None
            where none were stored.
        files: names in the checkpoint.
        array_digests: CRC-64/NVME of the elements of arrays, by key, where stored.
    """

    table: ChunkTable
    file: Ints
    offset_bytes: Ints
    digest_start: Ints
    digests: npt.NDArray[np.uint64] | None
    files: tuple[str, ...]
    array_digests: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Rows) -> StoredChunks:
        """Return the chosen rows; digests and files are shared with this table."""
        return replace(
            self,
            table=self.table.take(rows),
            file=self.file[rows],
            offset_bytes=self.offset_bytes[rows],
            # `digest_start` points into all digests, so they need not be copied for a few rows.
            digest_start=self.digest_start[rows],
        )


def block_counts(nbytes: Ints) -> Ints:
    """Return the number of digest blocks of chunks of these lengths in bytes, `[n]`."""
    counts: Ints = -(-nbytes >> _DIGEST_BLOCK_BITS)  # rounded up; a shift is much faster than a division
    return counts
