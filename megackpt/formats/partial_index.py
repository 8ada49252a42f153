"""An index that reads only the rows that a rank needs.

Every block that is read is checked against its digest before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.formats.documents import damaged
from megackpt.formats.index_file import StoredIndex, check_locations
from megackpt.formats.index_head import IndexHead, Marks, changed_bytes, marked_ranges, read_head
from megackpt.formats.index_layout import ROW_COLUMNS
from megackpt.formats.strategy import Json
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ArraySpec, ChunkTable, StoredChunks, block_counts
from megackpt.plans.planning.load_plan import overlapping_chunks
from megackpt.storage import MAX_BORROWED_BYTES, Store, block_digests, check_name

READ_ROWS = 128 * 1024
"""Rows read at once, column by column; fewer where a column of so many would not fit into a buffer."""

GAP_ROWS = 16 * 1024
"""Rows between needed ones that are read with them, if there are no more: 64 KiB of a column take less time
than another request."""

_ANYWHERE = 2**62


class PartialIndex(StoredIndex):
    """An index that has read its head, and reads rows when they are asked for."""

    def __init__(self, store: Store, head: IndexHead) -> None:
        self._store, self._head = store, head

    @classmethod
    def open(cls, store: Store, entry: Json, where: str) -> PartialIndex:
        """Read the head of the index that an entry names; errors are those of `read_head`."""
        return cls(store, read_head(store, entry, where))

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
        # A box from -1 to a bound beyond all coordinates overlaps every chunk of an array; one that stops at
        # 0 overlaps none.
        chosen = np.array([a.key in keys for a in self.arrays], np.bool_)
        high = np.where(chosen, _ANYWHERE, 0)[:, None].repeat(dims, axis=1)
        table, columns = self._read(self._head.blocks_of_keys(keys), np.full(high.shape, -1), high)
        return self._with_digests(table, columns, np.arange(len(table)))

    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Read the chunks that overlap these."""
        low, high = self._hulls(wanted)
        table, columns = self._read(self._head.blocks_overlapping(wanted), low, high)
        # These rows overlap the hull of what is wanted of their array; keep those that overlap a chunk of it.
        overlaps = np.zeros(len(table), np.bool_)
        for requested in wanted:
            dims = max(requested.dims, table.dims)
            overlaps[overlapping_chunks(requested.padded_to(dims), table.padded_to(dims))[1]] = True
        return self._with_digests(table, columns, np.flatnonzero(overlaps))

    def _hulls(self, wanted: Sequence[ChunkTable]) -> tuple[Ints, Ints]:
        """Return for each array the box around all that is wanted of it, as starts and stops, `[a, dims]`."""
        whole = self._head.decoded.whole
        # An array that is not asked for has a box that ends before it begins, so no chunk overlaps it.
        low, high = np.full(whole.shape, _ANYWHERE), np.zeros(whole.shape, np.int64)
        for table in wanted:
            # A request without elements needs no chunk, and would make the hull larger.
            rows = np.flatnonzero(table.flat_stop > table.flat_start)
            if not len(rows):
                continue
            array = self._head.numbers_of(table)[table.array[rows]]
            start = np.zeros((len(rows), whole.shape[1]), np.int64)
            stop = np.ones_like(start)
            dims = min(table.dims, whole.shape[1])  # no stored array has more, so no wanted one has either
            start[:, :dims] = table.start[rows, :dims]
            stop[:, :dims] = start[:, :dims] + table.shape[rows, :dims]
            np.minimum.at(low, array, start)
            np.maximum.at(high, array, stop)
        return low, high

    def _read(self, blocks: Marks, low: Ints, high: Ints) -> tuple[ChunkTable, dict[str, Ints]]:
        """Read blocks of rows; return the rows that overlap the box of their array, `[low, high)`.

        With the table come the columns that it has no room for: `file`, `offset_bytes` and `digest_start`.
        """
        head = self._head
        # One part without rows: then there is something to concatenate if no block is needed.
        nothing = {n: np.zeros((0, *head.rows[n].shape[1:]), np.int64) for n in ROW_COLUMNS}
        read = [{"array": np.zeros(0, np.int64), "digest_start": np.zeros(0, np.int64), **nothing}]
        widest = max(head.rows[name].row_nbytes for name in ROW_COLUMNS)
        most_blocks = max(1, min(READ_ROWS, MAX_BORROWED_BYTES // widest) // head.block_rows)
        gap = GAP_ROWS // head.block_rows
        for group in _groups_of(blocks, most=most_blocks, gap=gap):
            row_blocks = _RowBlocks(self._store, head, group, blocks[group.start : group.stop])
            read.append(row_blocks.overlapping(low, high))
        columns = {name: np.concatenate([part[name] for part in read]) for name in read[0]}
        others = {name: columns.pop(name) for name in ("file", "offset_bytes", "digest_start")}
        return ChunkTable.of_rows(head.decoded, columns, where=head.where), others

    def _with_digests(self, table: ChunkTable, columns: dict[str, Ints], rows: Ints) -> StoredChunks:
        """Return the chosen rows with the names of their files, and with their digests, which are read."""
        head = self._head
        table, file, offset = table.take(rows), columns["file"][rows], columns["offset_bytes"][rows]
        check_locations(table, file, offset, files=len(head.file_ends), where=head.where)
        # Names are read of the files that these rows are in, and files are numbered anew among these.
        used, file = np.unique(file, return_inverse=True)
        names = head.file_names(used)
        for name in names:
            check_name(name, location=self._store.location)
        start, digests = self._digests(columns["digest_start"][rows], block_counts(table.nbytes))
        return StoredChunks(table, file.reshape(-1), offset, start, digests, names)

    def _digests(self, start: Ints, counts: Ints) -> tuple[Ints, npt.NDArray[np.uint64]]:
        """Read the blocks with these ranges of digests; return where each range begins, and the digests."""
        head, size = self._head, self._head.block_digests
        blocks = marked_ranges(start // size, -(-(start + counts) // size), len(head.digest_digests))
        parts = [
            _read_digests(self._store, head, group) for group in _groups_of(blocks, most=len(blocks), gap=0)
        ]
        digests = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint64), *parts])
        # A range moves forward by the blocks before it that were not read.
        left_out = np.append(np.cumsum(~blocks), 0)
        return start - left_out[start // size] * size, digests


def _groups_of(blocks: Marks, *, most: int, gap: int) -> Iterator[range]:
    """Yield ranges of blocks that contain all marked ones, none with more than `most` blocks.

    Up to `gap` blocks between marked ones are included.
    """
    begin = end = 0
    for block in np.flatnonzero(blocks).tolist():
        if end > begin and (block - end > gap or block - begin >= most):
            yield range(begin, end)
            begin = block
        elif end == begin:
            begin = block
        end = block + 1
    if end > begin:
        yield range(begin, end)


class _RowBlocks:
    """Neighbouring blocks of rows. The needed ones are checked against their digests.

    Columns are read one after the other, into a buffer of the store if one fits.
    """

    def __init__(self, store: Store, head: IndexHead, blocks: range, needed: Marks) -> None:
        self._store, self._head, self._blocks, self._needed = store, head, blocks, needed
        self._first = blocks.start * head.block_rows
        self._count = min(blocks.stop * head.block_rows, int(head.first_row[-1])) - self._first

    def overlapping(self, low: Ints, high: Ints) -> dict[str, Ints]:
        """Return the rows that overlap the box of their array, `[low, high)`, both `[arrays, dims]`.

        The columns are `ROW_COLUMNS`, `array`, and `digest_start`: where the digests of a row begin.

        Raises:
            IntegrityError: a block does not have the digest that the head has for it.
            FormatError: a block has more or fewer digests than its rows need.
        """
        # Few rows are left after the test along dim 0, so only these are taken from the other columns.
        with self._column("start") as start:
            rows, array = self._candidates(start[:, 0], low[:, 0], high[:, 0])
            taken = {"start": start[rows].astype(np.int64)}
        taken["shape"] = self._taken("shape", rows)
        overlaps = np.ones(len(rows), np.bool_)
        for d in range(low.shape[1]):
            begin = taken["start"][:, d]
            overlaps &= (begin < high[array, d]) & (begin + taken["shape"][:, d] > low[array, d])
        rows, array = rows[overlaps], array[overlaps]
        taken = {name: values[overlaps] for name, values in taken.items()}
        with self._column("nbytes") as nbytes:
            taken["nbytes"] = nbytes[rows].astype(np.int64)
            digest_start = self._digest_start(nbytes, rows)
        others = {name: self._taken(name, rows) for name in ROW_COLUMNS if name not in taken}
        return {"array": array, "digest_start": digest_start, **taken, **others}

    def _taken(self, name: str, rows: Ints) -> Ints:
        """Return some rows of a column."""
        with self._column(name) as values:
            return values[rows].astype(np.int64)

    @contextlib.contextmanager
    def _column(self, name: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Yield all rows of a column, valid until the end of the block.

        Raises:
            IntegrityError: a block that is needed does not have the digest that the head has for it.
        """
        head, column = self._head, self._head.rows[name]
        nbytes, block_nbytes = self._count * column.row_nbytes, head.block_rows * column.row_nbytes
        begin = column.offset_bytes + self._first * column.row_nbytes
        expected = head.row_digests[self._blocks.start : self._blocks.stop, ROW_COLUMNS.index(name)]
        with _borrowed(self._store, head.name, begin, nbytes) as data:
            for group in _groups_of(self._needed, most=len(expected), gap=0):
                actual = block_digests(
                    data[group.start * block_nbytes : group.stop * block_nbytes], block_nbytes
                )
                wrong = np.flatnonzero(actual != expected[group.start : group.stop])
                if wrong.size:
                    at = begin + (group.start + int(wrong[0])) * block_nbytes
                    raise changed_bytes(head.where, at, min(at + block_nbytes, begin + nbytes))
            yield np.frombuffer(data, column.dtype).reshape(self._count, *column.shape[1:])

    def _candidates(self, start: npt.NDArray[np.integer[Any]], low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the rows of needed blocks that may overlap `[low, high)` along dim 0, and their arrays.

        start is where rows begin along it. This looks at every row, so it stays in the dtype of the file.
        """
        # The arrays of these rows, and how many rows each has here.
        first_row, stop = self._head.first_row, self._first + self._count
        first_array = int(np.searchsorted(first_row, self._first, side="right")) - 1
        last_array = int(np.searchsorted(first_row, stop, side="left"))
        ends = np.clip(first_row[first_array : last_array + 1], self._first, stop)
        counts = ends[1:] - ends[:-1]
        # The least and the greatest start of a chunk that may overlap. The greatest is inclusive, as one
        # past it need not fit into the dtype.
        most = int(np.iinfo(start.dtype).max)
        arrays = slice(first_array, last_array)
        lowest = np.clip(low[arrays] - self._head.reach[arrays] + 1, 0, most).astype(start.dtype)
        highest = np.clip(high[arrays] - 1, 0, most).astype(start.dtype)
        may_overlap = start >= np.repeat(lowest, counts)
        may_overlap &= start <= np.repeat(highest, counts)
        if not self._needed.all():
            may_overlap &= np.repeat(self._needed, self._head.block_rows)[: self._count]
        rows = np.flatnonzero(may_overlap)
        return rows, np.repeat(np.arange(first_array, last_array), counts)[rows]

    def _digest_start(self, nbytes: npt.NDArray[np.integer[Any]], rows: Ints) -> Ints:
        """Return where the digests of these rows begin; nbytes is of all rows.

        Raises:
            FormatError: a block has more or fewer digests than its rows need.
        """
        head, blocks = self._head, self._blocks
        # Digests before each row, counted from the first row here; and those before each block.
        before_row = np.concatenate(([0], np.cumsum(block_counts(nbytes.astype(np.int64)))))
        before_block = before_row[np.minimum(np.arange(len(blocks) + 1) * head.block_rows, self._count)]
        # The head knows where the digests of each block begin in the file.
        block_start = head.block_digest_start[blocks.start : blocks.stop + 1]
        block = rows // head.block_rows
        start = block_start[block] + before_row[rows] - before_block[block]
        stop = block_start[block] + before_row[rows + 1] - before_block[block]
        # Blocks that are not needed were not compared with their digests, so what they say does not count.
        fits = np.diff(before_block) == np.diff(block_start)
        is_outside = np.any(start < block_start[block]) or np.any(stop > block_start[block + 1])
        if np.any(~fits & self._needed) or is_outside:
            chunks = f"{self._first}:{self._first + self._count}"
            raise damaged(f"of the chunks {chunks} some have more or fewer digests than blocks", head.where)
        return start


@contextlib.contextmanager
def _borrowed(store: Store, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of a file of any length, valid until the end of the block."""
    if nbytes <= MAX_BORROWED_BYTES:
        with store.borrow(name, offset_bytes, nbytes) as data:
            yield data
        return
    data = memoryview(bytearray(nbytes))
    store.read_into(name, offset_bytes, data)
    yield data


def _read_digests(store: Store, head: IndexHead, blocks: range) -> npt.NDArray[np.uint64]:
    """Read neighbouring blocks of digests.

    Raises:
        IntegrityError: a block does not have the digest that the head has for it.
    """
    column, size = head.rows["digest"], head.block_digests
    begin = blocks.start * size
    digests = np.empty(min(blocks.stop * size, column.shape[0]) - begin, np.uint64)
    data = digests.data.cast("B")
    store.read_into(head.name, column.offset_bytes + begin * 8, data)
    # Digests have digests, too: a changed one would make undamaged data look damaged.
    wrong = np.flatnonzero(block_digests(data, size * 8) != head.digest_digests[blocks.start : blocks.stop])
    if wrong.size:
        low = column.offset_bytes + (begin + int(wrong[0]) * size) * 8
        stop = min(low + size * 8, column.offset_bytes + column.nbytes)
        raise changed_bytes(head.where, low, stop)
    return digests
