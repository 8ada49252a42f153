"""The interface of an opened checkpoint: what is stored, and its chunks.

`FileChunks` reads uncompressed chunks from files and compares their digests.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megackpt.errors import CheckpointError, IntegrityError
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, OBJECT, ArraySpec, ChunkTable, StoredChunks
from megackpt.storage import Store, digest_list

MAX_REPEATED_BYTES = 64 * 1024 * 1024
"""Expanded tensors that are read together may need so many bytes more than are stored of them."""


class Part(NamedTuple):
    """A range of the bytes of a chunk; it begins and ends where `Chunks.block_bytes` allows it."""

    row: int
    start: int
    stop: int


Borrow: TypeAlias = Callable[[Sequence[Part], bool], AbstractContextManager[list[memoryview]]]
"""Reads parts of one file at once; the second argument says whether to verify them.

The context manager returns the bytes of each part, valid until the end of the block, and raises what
`Chunks.read_into` raises. From the first to the last byte of all, the parts extend over at most
`megackpt.storage.MAX_BORROWED_BYTES`. Several threads may call it at once.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RawRanges:
    """Where n uncompressed chunks lie in files, so that neighbours can be read in one request.

    Attributes:
        file: number of the file of each chunk, `[n]`.
        offset_bytes: where each chunk begins in its file, `[n]`.
        borrow: reads parts of one file at once.
    """

    file: Ints
    offset_bytes: Ints
    borrow: Borrow


@dataclass(frozen=True, slots=True, eq=False)
class FileRanges:
    """Where n chunks lie, in columns.

    Attributes:
        files: names of files in the checkpoint.
        nbytes: how long each file must be, `[files]`; -1 where that is not known.
        file: number of the file of each chunk, `[n]`.
        start: first byte of each chunk in its file, `[n]`.
        stop: one past the last byte, `[n]`; -1 where a chunk has no bytes of its own in its file, as under
            compression.
        is_checked: whether a read detects bytes that have changed, `[n]`.
    """

    files: tuple[str, ...]
    nbytes: Ints
    file: Ints
    start: Ints
    stop: Ints
    is_checked: npt.NDArray[np.bool_]


class Chunks(ABC):
    """Chunks of an opened checkpoint.

    Attributes:
        table: the chunks, sorted by array, start and flat range.
        position: a number for each chunk, `[n]`: reading in the order of these numbers reads files from front
            to back.
        block_bytes: a read begins at a multiple of this in a chunk, and ends at one or at the end of the
            chunk; at most 1 MiB. 1: anywhere.
        has_checksums: whether a change of any byte can be found, if `file_ranges` does not say it.
    """

    table: ChunkTable
    position: Ints
    block_bytes: int = 1
    has_checksums: bool = True

    def object_rows(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Return the row of each object in the table, by the key of its array and its offset there."""
        table = self.table
        is_object = np.array([spec.dtype == OBJECT for spec in table.arrays], np.bool_)
        rows = {}
        for row in np.flatnonzero(is_object[table.array]).tolist():
            spec = table.arrays[int(table.array[row])]
            rows[spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())] = row
        return rows

    @abstractmethod
    def describe(self, row: int) -> str:
        """Return where the bytes of a chunk lie, for messages."""

    @abstractmethod
    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with the bytes `[start, start + len(out))` of a chunk in row-major order.

        Several threads may call it at once.

        Raises:
            IntegrityError: verify is set, and a block does not have the digest that was stored for it.
            StorageError, FormatError: the bytes cannot be read, or are missing.
        """

    def read_parts(self, parts: Sequence[Part], outs: Sequence[memoryview]) -> None:
        """Fill each of outs with the bytes of a part, verified. Raises what `read_into` raises.

        Chunks that are computed from others override this, to plan all of these reads at once.
        """
        for part, out in zip(parts, outs, strict=True):
            self.read_into(part.row, part.start, out, verify=True)

    def raw_ranges(self) -> RawRanges | None:
        """Return where the chunks lie, if all are stored as they are; None if any has to be decoded."""
        return None

    def is_cached(self) -> bool:
        """Return whether no read waits for a disk or a network, as far as can be known."""
        return False

    def file_ranges(self) -> FileRanges | None:
        """Return where the chunks lie, without reading anything; the files may be missing.

        None if the format does not know, or does not want files to be checked before they are read.
        """
        return None


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened checkpoint.

    Attributes:
        arrays: every global array and array of objects, by key.
        chunks: returns the stored chunks of the given keys.
        common: returns the value that `SaveStrategy.write_common` stored.
        decode_object: returns the value of an object from the bytes of its chunk; the second argument says
            where they come from, for messages.
        identity: the same on all ranks that have opened the same commit.
        unreadable: keys that are stored, but not in arrays, with the reason why they cannot be loaded.
        chunks_overlapping: returns the stored chunks that overlap any of the given ones, and possibly others
            of the same arrays, all of which are stored. None if the format cannot find them faster than all
            chunks of these arrays.
        rebuilt: opens the same contents with the bytes of chunks computed from other files, which are checked
            against their digests as usual; None if the checkpoint has no parity.
        names_save: whether `identity` is unique to this save: no other save can have the same.
        array_digests: CRC-64/NVME of the elements of arrays, little-endian in row-major order, by key; only
            of the arrays of which one is stored.
        origin: what wrote the files, such as "torch.save, 4 ranks"; "" for a checkpoint.
        left_out: other values of the files, which cannot be loaded, each with the reason.
        keeps_referenced_arrays: if common state refers to arrays and a copy's format cannot, the copy keeps
            these arrays and drops the references; else they become tensors of common state.
        inline: the elements of arrays that are no chunks, but tensors of common state, by key; see
            `engine.checkpoint.inline_arrays`. No format opens its checkpoints with any.
        unpadded: shapes of arrays without their padding, by key, where a save has stored them; see
            `ShardedTensor.unpadded_shape`.
        check_bytes: compares checksums that no read of chunks compares, for which all files are read; raises
            the first error. None if there are none.
        check_unchanged: raises an error if a file is not the one that was opened. None for formats whose
            files have digests, or names that no later save uses.
    """

    arrays: Mapping[str, ArraySpec]
    chunks: Callable[[Iterable[str]], Chunks]
    common: Callable[[], Any]  # whatever the user saved
    decode_object: Callable[[bytes, str], Any]  # likewise
    identity: str
    unreadable: Mapping[str, str] = field(default_factory=dict)
    chunks_overlapping: Callable[[Sequence[ChunkTable]], Chunks] | None = None
    rebuilt: Callable[[], Contents] | None = None
    names_save: bool = True
    array_digests: Mapping[str, int] = field(default_factory=dict)
    origin: str = ""
    left_out: Sequence[str] = ()
    keeps_referenced_arrays: bool = False
    inline: Mapping[str, Any] = field(default_factory=dict)
    unpadded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    check_bytes: Callable[[], None] | None = None
    check_unchanged: Callable[[], None] | None = None

    def chunks_for(self, wanted: Sequence[ChunkTable]) -> Chunks:
        """Return the stored chunks that a load of wanted needs, and as few others as possible. Local."""
        if self.chunks_overlapping is not None:
            return self.chunks_overlapping(wanted)
        return self.chunks(sorted({spec.key for table in wanted for spec in table.arrays}))


# Uncompressed chunks in files: they are read by range, and compared with their digests where there are some.

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
