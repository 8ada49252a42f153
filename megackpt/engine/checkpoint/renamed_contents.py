"""A view of a checkpoint in which stored arrays have the names that `LoadOptions.rename` gives them.

`validation.renaming` decides the new name of each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from megackpt.formats.contents import Chunks, Contents, FileRanges, RawRanges
from megackpt.metadata import ChunkTable
from megackpt.validation.renaming import rename_keys


def with_renamed_keys(contents: Contents, patterns: Mapping[str, str]) -> Contents:
    """Return the same contents with keys renamed by patterns, which are those of `LoadOptions.rename`."""
    if not patterns:
        return contents
    new_name = rename_keys(contents.arrays, patterns)
    old_name = {new: old for old, new in new_name.items()}

    def chunks(keys: Iterable[str]) -> Chunks:
        return _RenamedChunks(contents.chunks([old_name[key] for key in keys]), new_name)

    def chunks_overlapping(wanted: Sequence[ChunkTable]) -> Chunks:
        return _RenamedChunks(
            contents.chunks_for([_with_keys(table, old_name) for table in wanted]), new_name
        )

    arrays = {new_name[key]: replace(spec, key=new_name[key]) for key, spec in contents.arrays.items()}
    return replace(contents, arrays=arrays, chunks=chunks, chunks_overlapping=chunks_overlapping)


class _RenamedChunks(Chunks):
    """The same chunks; only the keys of their arrays differ."""

    def __init__(self, chunks: Chunks, new_name: Mapping[str, str]) -> None:
        self._chunks = chunks
        self.table = _with_keys(chunks.table, new_name)
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


def _with_keys(table: ChunkTable, new_name: Mapping[str, str]) -> ChunkTable:
    """Return the same table with the keys of its arrays replaced."""
    return replace(table, arrays=tuple(replace(a, key=new_name[a.key]) for a in table.arrays))
