"""Reading an index: the rows that a rank needs, or all of them.

Owns which parts of the file are read, and that each is checked against its digest before it is believed.
A small index, and one that was written without a head, is read whole: that is one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megackpt.formats.index_blocks import RowBlocks, digests_of, runs_of
from megackpt.formats.index_file import check_places, entry_of, read_index
from megackpt.formats.index_head import IndexHead, Marks, marked_ranges, read_head
from megackpt.formats.index_layout import ROW_COLUMNS
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.geometry import Ints
from megackpt.metadata import ArraySpec, ChunkTable, StoredChunks, block_counts
from megackpt.planning.overlaps import overlapping_chunks
from megackpt.storage import MAX_BORROWED_BYTES, Store, check_name

WHOLE_BYTES = 1024 * 1024
"""An index of no more than this is read whole."""

SPAN_ROWS = 128 * 1024
"""Rows read at once, column by column; fewer where a column of so many would not fit into a lent buffer."""

GAP_ROWS = 16 * 1024
"""Rows that nobody needs are read with those around them where they are no more: 64 KiB of a column cost
less than another request."""

_ANYWHERE = 2**62


class StoredIndex(Protocol):
    """An opened index."""

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays of the checkpoint, sorted by key."""

    @property
    def array_digests(self) -> Mapping[str, int]:
        """CRC-64/NVME of the elements of arrays, by key, for those of which one is stored."""

    def of_keys(self, keys: Iterable[str]) -> StoredChunks:
        """Return all chunks of these arrays, in index order; keys that are none are passed over."""

    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Return all chunks that meet one of these, and maybe others of the same arrays, in index order.

        All keys of wanted are stored.
        """


def open_index(
    store: Store, said: Json, *, holder: str = MANIFEST, whole_bytes: int = WHOLE_BYTES
) -> StoredIndex:
    """Open the index that the entry `index` of said names; holder is the file that said comes from.

    Raises:
        FormatError, IntegrityError: it is not what the format, or the entry, says.
    """
    entry, where = entry_of(store, said, "index", holder=holder)
    if "head" not in entry or entry["nbytes"] <= whole_bytes:
        return WholeIndex(read_index(store, said, holder=holder))
    return PartialIndex(store, read_head(store, entry, where))


class WholeIndex:
    """A `StoredIndex` that was read whole."""

    def __init__(self, stored: StoredChunks) -> None:
        self._stored = stored

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays."""
        return self._stored.table.arrays

    @property
    def array_digests(self) -> Mapping[str, int]:
        """Digests of arrays."""
        return self._stored.array_digests

    def of_keys(self, keys: Iterable[str]) -> StoredChunks:
        """Return the chunks of these arrays."""
        wanted = set(keys)
        chosen = np.array([a.key in wanted for a in self.arrays], np.bool_)
        return self._stored.take(np.flatnonzero(chosen[self._stored.table.array]))

    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Return the chunks of the same arrays."""
        return self.of_keys(spec.key for table in wanted for spec in table.arrays)


class PartialIndex:
    """A `StoredIndex` of which only the head was read so far."""

    def __init__(self, store: Store, head: IndexHead) -> None:
        self._store, self._head = store, head

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays."""
        return self._head.arrays

    @property
    def array_digests(self) -> Mapping[str, int]:
        """Digests of arrays."""
        return self._head.array_digests

    def of_keys(self, keys: Iterable[str]) -> StoredChunks:
        """Read the chunks of these arrays."""
        keys = set(keys)
        dims = self._head.decoded.whole.shape[1]
        chosen = np.array([a.key in keys for a in self.arrays], np.bool_)
        high = np.where(chosen, _ANYWHERE, 0)[:, None].repeat(dims, axis=1)
        table, rest = self._read(self._head.blocks_of_keys(keys), np.full(high.shape, -1), high)
        return self._with_digests(table, rest, np.arange(len(table)))

    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Read the chunks that meet these."""
        low, high = self._hulls(wanted)
        table, rest = self._read(self._head.blocks_meeting(wanted), low, high)
        meeting = np.zeros(len(table), np.bool_)
        for of in wanted:
            dims = max(of.dims, table.dims)
            meeting[overlapping_chunks(of.padded_to(dims), table.padded_to(dims))[1]] = True
        return self._with_digests(table, rest, np.flatnonzero(meeting))

    def _hulls(self, wanted: Sequence[ChunkTable]) -> tuple[Ints, Ints]:
        """Return for each array the box around all that is wanted of it, as starts and stops, `[a, dims]`."""
        whole = self._head.decoded.whole
        low, high = np.full(whole.shape, _ANYWHERE), np.zeros(whole.shape, np.int64)
        for table in wanted:
            rows = np.flatnonzero(table.flat_stop > table.flat_start)
            if not len(rows):
                continue
            array = self._head.numbers_of(table)[table.array[rows]]
            start = np.zeros((len(rows), whole.shape[1]), np.int64)
            stop = np.ones_like(start)
            dims = min(table.dims, whole.shape[1])  # no stored array has more, so nor has one that is wanted
            start[:, :dims] = table.start[rows, :dims]
            stop[:, :dims] = start[:, :dims] + table.shape[rows, :dims]
            np.minimum.at(low, array, start)
            np.maximum.at(high, array, stop)
        return low, high

    def _read(self, blocks: Marks, low: Ints, high: Ints) -> tuple[ChunkTable, dict[str, Ints]]:
        """Read blocks of rows, and return of each array those that meet the box from low to high.

        Besides the table comes what else is known of a row: `file`, `offset_bytes` and `digest_start`.
        """
        head = self._head
        nothing = {n: np.zeros((0, *head.rows[n].shape[1:]), np.int64) for n in ROW_COLUMNS}
        found = [{"array": np.zeros(0, np.int64), "digest_start": np.zeros(0, np.int64), **nothing}]
        longest = max(head.rows[name].row_nbytes for name in ROW_COLUMNS)
        at_once = max(1, min(SPAN_ROWS, MAX_BORROWED_BYTES // longest) // head.block_rows)
        gap = GAP_ROWS // head.block_rows
        for run in runs_of(blocks, longest=at_once, gap=gap):
            part = RowBlocks(self._store, head, run, blocks[run.start : run.stop])
            found.append(part.meeting(low, high))
        columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        rest = {name: columns.pop(name) for name in ("file", "offset_bytes", "digest_start")}
        return ChunkTable.of_rows(head.decoded, columns, where=head.where), rest

    def _with_digests(self, table: ChunkTable, rest: dict[str, Ints], rows: Ints) -> StoredChunks:
        """Return the chosen rows with the names of their files and their digests, which are read."""
        head = self._head
        table, file, offset = table.take(rows), rest["file"][rows], rest["offset_bytes"][rows]
        check_places(table, file, offset, files=len(head.file_ends), where=head.where)
        used, file = np.unique(file, return_inverse=True)
        names = head.file_names(used)
        for name in names:
            check_name(name, location=self._store.location)
        start, digests = self._digests(rest["digest_start"][rows], block_counts(table.nbytes))
        return StoredChunks(table, file.reshape(-1), offset, start, digests, names)

    def _digests(self, start: Ints, counts: Ints) -> tuple[Ints, npt.NDArray[np.uint64]]:
        """Read the blocks that hold these ranges of digests; return where ranges begin in them, and them."""
        head, size = self._head, self._head.block_digests
        blocks = marked_ranges(start // size, -(-(start + counts) // size), len(head.digest_digests))
        runs = runs_of(blocks, longest=len(blocks), gap=0)
        parts = [digests_of(self._store, head, run) for run in runs]
        digests = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint64), *parts])
        behind = np.append(np.cumsum(~blocks), 0)  # blocks that are left out up to each
        return start - behind[start // size] * size, digests
