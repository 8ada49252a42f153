"""Chunks that lie raw in files.

Owns reading a range of one, and checking it where digests were stored.
"""

from __future__ import annotations

import numpy as np

from megackpt.errors import IntegrityError
from megackpt.geometry import Ints
from megackpt.metadata import DIGEST_BLOCK_BYTES, ChunkTable, StoredChunks
from megackpt.storage import Store, block_digests


class FileChunks:
    """Chunks whose bytes stand in files as they are; see `Chunks` for what its methods do."""

    def __init__(self, store: Store, stored: StoredChunks) -> None:
        self._store = store
        self.stored = stored
        self.block_bytes = 1 if stored.digests is None else DIGEST_BLOCK_BYTES

    @property
    def table(self) -> ChunkTable:
        """The chunks."""
        return self.stored.table

    @property
    def place(self) -> Ints:
        """Rank of each chunk by file and offset."""
        order = np.lexsort((self.stored.offset_bytes, self.stored.file))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place

    def describe(self, row: int) -> str:
        """Name the file and the byte range."""
        start = int(self.stored.offset_bytes[row])
        return f"bytes {start}:{start + int(self.table.nbytes[row])} of {self._path(row)}"

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Read, and compare with the digests of the blocks that out covers."""
        name = self.stored.files[int(self.stored.file[row])]
        self._store.read_into(name, int(self.stored.offset_bytes[row]) + start, out)
        if verify and self.stored.digests is not None:
            self._verify(row, start, out)

    def _verify(self, row: int, start: int, data: memoryview) -> None:
        stored = self.stored
        assert stored.digests is not None
        first = start // DIGEST_BLOCK_BYTES
        found = block_digests(data, DIGEST_BLOCK_BYTES)
        begin = int(stored.digest_start[row]) + first
        wrong = np.flatnonzero(found != stored.digests[begin : begin + len(found)])
        if not wrong.size:
            return
        block = first + int(wrong[0])
        key = stored.table.arrays[int(stored.table.array[row])].key
        low = int(stored.offset_bytes[row]) + block * DIGEST_BLOCK_BYTES
        high = min(low + DIGEST_BLOCK_BYTES, int(stored.offset_bytes[row] + stored.table.nbytes[row]))
        raise IntegrityError(
            f"{key!r} {stored.table.describe(row)}: the bytes {low}:{high} of {self._path(row)} are not "
            f"those that were saved (their digest differs). The file is damaged; load another checkpoint.",
            key=key,
            path=self._path(row),
        )

    def _path(self, row: int) -> str:
        return f"{self._store.location}/{self.stored.files[int(self.stored.file[row])]}"
