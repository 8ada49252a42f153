"""Chunks that are stored uncompressed in files, read by range and checked where digests were stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest

import numpy as np

from megackpt.errors import CheckpointError, IntegrityError
from megackpt.formats.contents import Chunks, FileRanges, Part, RawRanges
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, StoredChunks
from megackpt.storage import Store, digest_list

_SAMPLED_FILES = 16  # whose state tells whether all are in memory


class FileChunks(Chunks):
    """Chunks that are stored uncompressed, whose bytes can be read straight from a file."""

    def __init__(self, store: Store, stored: StoredChunks) -> None:
        self._store = store
        self.stored = stored
        self.table = stored.table
        # A block is compared as a whole, so reads with digests begin and end with blocks.
        self.block_bytes = 1 if stored.digests is None else DIGEST_BLOCK_BYTES

    @cached_property
    def position(self) -> Ints:  # type: ignore[override]  # computed when it is first needed
        """Position of each chunk by file and offset."""
        order = np.lexsort((self.stored.offset_bytes, self.stored.file))
        # `order` lists rows by position; its inverse is the position of each row.
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        return position

    def describe(self, row: int) -> str:
        """Return the file and the byte range of a chunk."""
        start = int(self.stored.offset_bytes[row])
        return f"bytes {start}:{start + int(self.table.nbytes[row])} of {self._path(row)}"

    def file_ranges(self) -> FileRanges:
        """Return where the chunks lie."""
        start = self.stored.offset_bytes
        return FileRanges(
            self.stored.files,
            # An index has the ends of chunks, but not the lengths of files.
            np.full(len(self.stored.files), -1, np.int64),
            self.stored.file,
            start,
            start + self.table.nbytes,
            np.full(len(start), self.stored.digests is not None, np.bool_),
        )

    def raw_ranges(self) -> RawRanges:
        """Return where the chunks lie, for reads of neighbours."""
        return RawRanges(self.stored.file, self.stored.offset_bytes, self._borrow)

    def is_cached(self) -> bool:
        """Return whether no read waits, as far as the store knows. Asks about some files only."""
        used = np.unique(self.stored.file)[:_SAMPLED_FILES].tolist()
        try:
            return all(self._store.is_cached(self.stored.files[number]) for number in used)
        except CheckpointError:  # the read of the file reports the error
            return False

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Read a range of a chunk; with verify, digest its blocks while the rest is being read."""
        name = self.stored.files[int(self.stored.file[row])]
        offset = int(self.stored.offset_bytes[row]) + start
        if not verify or self.stored.digests is None or not out.nbytes:
            self._store.read_into(name, offset, out)
            return
        data, digests, digested = out.cast("B"), list[int](), 0
        for filled in self._store.stream_into(name, offset, data):
            if filled < len(data):  # digest complete blocks only, until the last part has come
                filled -= filled % DIGEST_BLOCK_BYTES
            digests += digest_list(data[digested:filled], DIGEST_BLOCK_BYTES)
            digested = filled
        self._compare(Part(row, start, start + len(data)), digests)

    @contextlib.contextmanager
    def _borrow(self, parts: Sequence[Part], verify: bool) -> Iterator[list[memoryview]]:
        """Read from the first part to the last one in one request, and check each."""
        offset = self.stored.offset_bytes[[part.row for part in parts]].tolist()
        # Parts may come in any order, and chunks may lie between them in the file.
        begins = [at + part.start for at, part in zip(offset, parts, strict=True)]
        first = min(begins)
        last = max(b + p.stop - p.start for b, p in zip(begins, parts, strict=True))
        name = self.stored.files[int(self.stored.file[parts[0].row])]
        with self._store.borrow(name, first, last - first) as data:
            views = [
                data[b - first : b - first + p.stop - p.start] for b, p in zip(begins, parts, strict=True)
            ]
            if verify and self.stored.digests is not None:
                for part, view in zip(parts, views, strict=True):
                    self._compare(part, digest_list(view, DIGEST_BLOCK_BYTES))
            yield views

    def _compare(self, part: Part, actual: Sequence[int]) -> None:
        """Compare the digests of all blocks of a part with those that were stored.

        Raises:
            IntegrityError: they differ, or there are more or fewer.
        """
        stored = self.stored
        assert stored.digests is not None
        # Parts begin and end at blocks, or at the end of the chunk, so all of these blocks were read whole.
        block, blocks = part.start // DIGEST_BLOCK_BYTES, -(-part.stop // DIGEST_BLOCK_BYTES)
        first = int(stored.digest_start[part.row])
        expected = stored.digests[first + block : first + blocks].tolist()
        if actual != expected:
            first_wrong = [a != b for a, b in zip_longest(actual, expected)].index(True)
            raise self._changed_block(part.row, block + first_wrong)

    def _changed_block(self, row: int, block: int) -> IntegrityError:
        """Return the error for a block that has another digest."""
        stored = self.stored
        key = stored.table.arrays[int(stored.table.array[row])].key
        low = int(stored.offset_bytes[row]) + block * DIGEST_BLOCK_BYTES
        high = min(low + DIGEST_BLOCK_BYTES, int(stored.offset_bytes[row] + stored.table.nbytes[row]))
        return IntegrityError(
            f"{key!r} {stored.table.describe(row)}: the bytes {low}:{high} of {self._path(row)} are not "
            f"those that were saved (their digest differs). The file is damaged; load another checkpoint.",
            key=key,
            path=self._path(row),
        )

    def _path(self, row: int) -> str:
        return f"{self._store.location}/{self.stored.files[int(self.stored.file[row])]}"
