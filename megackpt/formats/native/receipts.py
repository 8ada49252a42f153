"""What a rank has to tell of the data file that it writes: where data begins, and digests.

Owns what is computed of bytes as they pass, and how it is told to the rank that writes the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from megackpt.metadata import DIGEST_BLOCK_BYTES, ChunkTable, Column, pack_columns, unpack_columns
from megackpt.storage import BlockDigester

if TYPE_CHECKING:
    from megackpt.formats.array_digests import ArrayDigester, ChunkDigest, Contributions


class Digesting:
    """Takes the bytes of chunks, in the order of a file: digests of blocks and, if asked for, of arrays."""

    def __init__(self, chunks: ChunkTable, *, of_arrays: bool) -> None:
        self._blocks = BlockDigester(DIGEST_BLOCK_BYTES)
        self._arrays: ArrayDigester | None = None
        if of_arrays:
            from megackpt.formats.array_digests import ArrayDigester

            self._arrays = ArrayDigester(chunks)
        self._chunk: ChunkDigest | None = None
        self._contributions: Contributions = np.zeros(len(chunks), np.uint64)

    def begin(self, row: int) -> None:
        """Begin a chunk."""
        self._chunk = self._arrays.begin(row) if self._arrays is not None else None

    def update(self, data: memoryview) -> None:
        """Take the next bytes of it."""
        self._blocks.update(data)
        if self._chunk is not None:
            self._chunk.update(data)

    def end(self, row: int) -> None:
        """End the chunk."""
        self._blocks.end()
        if self._chunk is not None:
            self._contributions[row] = self._chunk.result()

    def receipt(self, *, data_start: int) -> bytes:
        """Return what is told; data_start is where the first chunk begins in the file."""
        said: dict[str, Column] = {
            "data_start": np.array([data_start], np.int64),
            "digests": self._blocks.result(),
        }
        return pack_columns(said | ({} if self._arrays is None else {"contributions": self._contributions}))


def unpacked(receipt: bytes, *, rank: int) -> Mapping[str, Column]:
    """Return what a rank has told: `data_start`, `digests` of blocks and, if asked for, `contributions`.

    Digests and contributions, one of each chunk to the digest of its array, are in the order of the file.
    """
    return unpack_columns(receipt, where=f"receipt of rank {rank}")
