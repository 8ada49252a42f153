"""The result of opening a checkpoint of any format: what is stored, and how to read its chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable


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

    def mapped(self, row: int) -> memoryview | None:
        """Return the bytes of a chunk that lie in memory, in row-major order; None if they must be read.

        They are valid as long as these chunks are. Several threads may call it at once.
        """
        return None

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
        names_save: whether `identity` is unique to this save: no other save can have the same.
        array_digests: CRC-64/NVME of the elements of arrays, little-endian in row-major order, by key; only
            of the arrays of which one is stored.
        unreadable: keys that are stored, but not in arrays, with the reason why they cannot be loaded.
        chunks_overlapping: returns the stored chunks that overlap any of the given ones, and possibly others
            of the same arrays, all of which are stored. None if the format cannot find them faster than all
            chunks of these arrays.
        origin: what wrote the files, such as "torch.save, 4 ranks"; "" for a checkpoint.
        left_out: other values of the files, which cannot be loaded, each with the reason.
        keeps_referenced_arrays: a copy to a format that cannot refer to arrays keeps those that common state
            refers to as arrays, and drops the references; else they become tensors of common state.
        inline: the elements of arrays that are no chunks, but tensors of common state, by key; see
            `engine.checkpoint.inline_arrays`. No format opens its checkpoints with any.
        check_bytes: compares checksums that no read of chunks compares, for which all files are read; raises
            the first error. None if there are none.
        check_unchanged: raises an error if a file is not the one that was opened. None for formats whose
            files have digests, or names that no later save uses.
        rebuilt: opens the same contents with the bytes of chunks computed from other files, which are checked
            against their digests as usual; None if the checkpoint has no parity.
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
    check_bytes: Callable[[], None] | None = None
    check_unchanged: Callable[[], None] | None = None

    def chunks_for(self, wanted: Sequence[ChunkTable]) -> Chunks:
        """Return the stored chunks that a load of wanted needs, and as few others as possible. Local."""
        if self.chunks_overlapping is not None:
            return self.chunks_overlapping(wanted)
        return self.chunks(sorted({spec.key for table in wanted for spec in table.arrays}))
