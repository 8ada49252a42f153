"""What an opened checkpoint offers, whatever its format.

Owns the protocols by which the engine reads: what is stored, and the way to the bytes of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.metadata import ArraySpec, ChunkTable


class Chunks(Protocol):
    """Chunks of an opened checkpoint, and the way to their bytes."""

    @property
    def table(self) -> ChunkTable:
        """The chunks, sorted by array, start and flat range."""

    @property
    def block_bytes(self) -> int:
        """A read begins at a multiple of it in a chunk, and ends at one or at the end; 1: anywhere.

        At most 1 MiB.
        """

    @property
    def place(self) -> Ints:
        """A number for each chunk, `[n]`: reading in their order runs through files from front to back."""

    def describe(self, row: int) -> str:
        """Say where the bytes of a chunk lie, for messages."""

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with the bytes `[start, start + len(out))` of a chunk in row-major order.

        Several threads may call it at once.

        Raises:
            IntegrityError: verify is set, and a block does not have the digest it was stored with.
            StorageError, FormatError: the bytes cannot be read, or are not there.
        """


class Part(NamedTuple):
    """A range of the bytes of a chunk; it begins and ends where `Chunks.block_bytes` lets a read do so."""

    row: int
    start: int
    stop: int


@runtime_checkable
class LiesInFiles(Protocol):
    """What `Chunks` also have whose bytes stand in files as they are, so that neighbours are read at once."""

    @property
    def file(self) -> Ints:
        """Number of the file of each chunk, `[n]`."""

    @property
    def offset_bytes(self) -> Ints:
        """Where each chunk begins in its file, `[n]`."""

    def lend(self, parts: Sequence[Part], *, verify: bool) -> AbstractContextManager[list[memoryview]]:
        """Yield the bytes of parts of one file, valid until the end of the block; errors are of `read_into`.

        From the first to the last byte of all, they span at most
        `megackpt.storage.MAX_BORROWED_BYTES`. Several threads may call it at once.
        """


@runtime_checkable
class MayBeCached(Protocol):
    """What `Chunks` also have that know whether their bytes are in memory already."""

    def is_cached(self) -> bool:
        """Say whether no read has to wait for a disk or a network, as far as can be told."""


@dataclass(frozen=True, slots=True, eq=False)
class FileRanges:
    """Where n chunks lie, in columns.

    Attributes:
        files: names of files in the checkpoint.
        nbytes: how long each must be, `[files]`; -1 where that is not known.
        file: number of the file of each chunk, `[n]`.
        start: first byte there, `[n]`.
        stop: one past the last, `[n]`; -1 where a chunk has no bytes of its own in its file, as under
            compression.
        is_checked: whether a read finds that bytes have changed, `[n]`.
    """

    files: tuple[str, ...]
    nbytes: Ints
    file: Ints
    start: Ints
    stop: Ints
    is_checked: npt.NDArray[np.bool_]


@runtime_checkable
class NamesFiles(Protocol):
    """What `Chunks` also have that can say where they lie without being read."""

    def file_ranges(self) -> FileRanges:
        """Return it; nothing is read, and the files need not be there."""


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened checkpoint.

    Attributes:
        arrays: every global array and array of objects, by key.
        chunks: returns the stored chunks of the given keys.
        common: returns the value that `SaveStrategy.write_common` was given.
        decode_object: returns the value of an object from the bytes of its chunk; the second argument says
            where they come from, for messages.
        identity: the same on all ranks that have opened the same commit.
        names_save: whether no other save has the same identity, wherever it is.
        array_digests: CRC-64/NVME of the elements of arrays, little-endian in row-major order, by key; of
            those arrays of which one is stored.
        unreadable: keys that are stored, and not in arrays, with the reason why they cannot be loaded.
        chunks_meeting: returns the stored chunks that meet any of the given ones, and maybe others of the
            same arrays, all of which are stored; None if the format cannot find them faster than all chunks
            of these arrays.
        rebuilt: opens the same contents with the bytes of chunks computed from other files, digests checked
            as ever; None if nothing was stored for that.
    """

    arrays: Mapping[str, ArraySpec]
    chunks: Callable[[Iterable[str]], Chunks]
    common: Callable[[], Any]  # whatever the user saved
    decode_object: Callable[[bytes, str], Any]  # likewise
    identity: str
    unreadable: Mapping[str, str] = field(default_factory=dict)
    chunks_meeting: Callable[[Sequence[ChunkTable]], Chunks] | None = None
    rebuilt: Callable[[], Contents] | None = None
    names_save: bool = True
    array_digests: Mapping[str, int] = field(default_factory=dict)

    def chunks_for(self, wanted: Sequence[ChunkTable]) -> Chunks:
        """Return the stored chunks that a load of these needs, as few others as the format can; local."""
        if self.chunks_meeting is not None:
            return self.chunks_meeting(wanted)
        return self.chunks(sorted({spec.key for table in wanted for spec in table.arrays}))
