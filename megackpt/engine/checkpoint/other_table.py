"""Chunks that are described by another table: of arrays with other names or shapes, and the same bytes."""

from __future__ import annotations

from megackpt.formats.contents import Chunks, FileRanges, RawRanges
from megackpt.plans.metadata import ChunkTable


class ChunksOfOtherTable(Chunks):
    """The same chunks, row by row, as chunks of other arrays.

    Args:
        chunks: the stored chunks.
        table: what they are chunks of; each row has the elements of the same row, in the same order.
    """

    def __init__(self, chunks: Chunks, table: ChunkTable) -> None:
        self._chunks = chunks
        self.table = table
        self.block_bytes, self.position = chunks.block_bytes, chunks.position

    def describe(self, row: int) -> str:
        """Return where the bytes of a chunk lie."""
        return self._chunks.describe(row)

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of a chunk."""
        self._chunks.read_into(row, start, out, verify=verify)

    def raw_ranges(self) -> RawRanges | None:
        """Return where uncompressed chunks lie."""
        return self._chunks.raw_ranges()

    def is_cached(self) -> bool:
        """Return whether no read waits."""
        return self._chunks.is_cached()

    def file_ranges(self) -> FileRanges | None:
        """Return where the chunks lie."""
        return self._chunks.file_ranges()
