"""The bytes of stored chunks, a bounded part at a time.

Owns the buffers for that, and how a chunk is cut so that its format can check each part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megackpt.formats.strategy import Chunks


def parts_of(chunks: Chunks, row: int, *, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges `[start, stop)` in which a chunk is read, in order.

    Each begins where the format can begin to read, and is no longer than buffer_bytes, or one block of the
    format where that is longer.
    """
    block = chunks.block_bytes
    step = max(buffer_bytes // block, 1) * block
    nbytes = int(chunks.table.nbytes[row])
    for start in range(0, nbytes, step):
        yield start, min(start + step, nbytes)


class Buffers:
    """Buffers that are used again: fresh memory costs more than reading into it. Safe for many threads."""

    def __init__(self) -> None:
        self._free: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def pieces(self, chunks: Chunks, row: int, *, buffer_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a chunk in order, checked, each part valid until the next is taken.

        Raises:
            IntegrityError, FormatError, StorageError: they cannot be read, or are not those that were saved.
        """
        buffer = self._take(chunks, row, buffer_bytes)
        try:
            for start, stop in parts_of(chunks, row, buffer_bytes=buffer_bytes):
                part = buffer.data[: stop - start]
                chunks.read_into(row, start, part, verify=True)
                yield part
        finally:
            self._free.append(buffer)

    def _take(
        self, chunks: Chunks, row: int, buffer_bytes: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        wanted = min(max(buffer_bytes, chunks.block_bytes), int(chunks.table.nbytes[row]))
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        return buffer if len(buffer) >= wanted else np.empty(wanted, np.uint8)
