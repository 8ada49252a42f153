"""Blocks of an index: read, checked against their digests, and searched.

Owns what is read in one request. Which blocks are needed is `index_reader`'s affair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.index_head import IndexHead, Marks
from megackpt.formats.index_layout import ROW_COLUMNS
from megackpt.geometry import Ints
from megackpt.metadata import block_counts
from megackpt.storage import MAX_BORROWED_BYTES, Store, block_digests


def runs_of(blocks: Marks, *, longest: int, gap: int) -> Iterator[range]:
    """Yield runs of blocks that hold all that are marked, none longer than `longest`.

    Up to `gap` blocks that are not marked are taken along.
    """
    begin = end = 0
    for block in np.flatnonzero(blocks).tolist():
        if end > begin and (block - end > gap or block - begin >= longest):
            yield range(begin, end)
            begin = block
        elif end == begin:
            begin = block
        end = block + 1
    if end > begin:
        yield range(begin, end)


class RowBlocks:
    """Neighbouring blocks of rows, of which those that are needed are checked.

    needed says which of the blocks these are. Columns are read one after the other, into memory of the store
    if one fits there.
    """

    def __init__(self, store: Store, head: IndexHead, blocks: range, needed: Marks) -> None:
        self._store, self._head, self._blocks, self._needed = store, head, blocks, needed
        self._first = blocks.start * head.block_rows
        self._count = min(blocks.stop * head.block_rows, int(head.first_row[-1])) - self._first

    def meeting(self, low: Ints, high: Ints) -> dict[str, Ints]:
        """Return the rows that meet the box of their array, of `[arrays, dims]`, from low to high.

        They come as `ROW_COLUMNS`, `array`, and `digest_start`: where their digests begin.

        Raises:
            IntegrityError: a block does not have the digest that the head has of it.
            FormatError: a block has not the digests that its rows need.
        """
        with self._column("start") as start:
            rows, array = self._reaching(start[:, 0], low[:, 0], high[:, 0])
            taken = {"start": start[rows].astype(np.int64)}
        taken["shape"] = self._taken("shape", rows)
        meets = np.ones(len(rows), np.bool_)
        for d in range(low.shape[1]):
            begin = taken["start"][:, d]
            meets &= (begin < high[array, d]) & (begin + taken["shape"][:, d] > low[array, d])
        rows, array = rows[meets], array[meets]
        taken = {name: values[meets] for name, values in taken.items()}
        with self._column("nbytes") as nbytes:
            taken["nbytes"] = nbytes[rows].astype(np.int64)
            digest_start = self._digest_start(nbytes, rows)
        rest = {name: self._taken(name, rows) for name in ROW_COLUMNS if name not in taken}
        return {"array": array, "digest_start": digest_start, **taken, **rest}

    def _taken(self, name: str, rows: Ints) -> Ints:
        """Return some rows of a column."""
        with self._column(name) as values:
            return values[rows].astype(np.int64)

    @contextlib.contextmanager
    def _column(self, name: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Yield all rows of a column, valid until the end of the block.

        Raises:
            IntegrityError: a block that is needed does not have the digest that the head has of it.
        """
        head, span = self._head, self._head.rows[name]
        nbytes, block_nbytes = self._count * span.row_nbytes, head.block_rows * span.row_nbytes
        begin = span.offset_bytes + self._first * span.row_nbytes
        said = head.row_digests[self._blocks.start : self._blocks.stop, ROW_COLUMNS.index(name)]
        with _borrowed(self._store, head.name, begin, nbytes) as data:
            for run in runs_of(self._needed, longest=len(said), gap=0):
                found = block_digests(data[run.start * block_nbytes : run.stop * block_nbytes], block_nbytes)
                wrong = np.flatnonzero(found != said[run.start : run.stop])
                if wrong.size:
                    at = begin + (run.start + int(wrong[0])) * block_nbytes
                    raise _differs(head, at, block_nbytes, begin + nbytes)
            yield np.frombuffer(data, span.dtype).reshape(self._count, *span.shape[1:])

    def _reaching(self, start: npt.NDArray[np.integer[Any]], low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the rows of needed blocks that may meet ranges along dim 0, and their arrays.

        start is where rows begin along it. As this looks at every row, it stays in the dtype of the file.
        """
        first_row, stop = self._head.first_row, self._first + self._count
        one = int(np.searchsorted(first_row, self._first, side="right")) - 1
        last = int(np.searchsorted(first_row, stop, side="left"))
        ends = np.clip(first_row[one : last + 1], self._first, stop)
        counts = ends[1:] - ends[:-1]
        most = int(np.iinfo(start.dtype).max)
        lowest = np.clip(low[one:last] - self._head.reach[one:last] + 1, 0, most).astype(start.dtype)
        # The last that may begin there, as one more need not fit into the dtype.
        highest = np.clip(high[one:last] - 1, 0, most).astype(start.dtype)
        meets = start >= np.repeat(lowest, counts)
        meets &= start <= np.repeat(highest, counts)
        if not self._needed.all():
            meets &= np.repeat(self._needed, self._head.block_rows)[: self._count]
        rows = np.flatnonzero(meets)
        return rows, np.repeat(np.arange(one, last), counts)[rows]

    def _digest_start(self, nbytes: npt.NDArray[np.integer[Any]], rows: Ints) -> Ints:
        """Return where the digests of these rows begin; nbytes is of all rows.

        Raises:
            FormatError: a block has not the digests that its rows need.
        """
        head, blocks = self._head, self._blocks
        ends = np.cumsum(block_counts(nbytes.astype(np.int64)))
        before = np.concatenate(([0], ends))
        of_block = np.minimum(np.arange(len(blocks) + 1) * head.block_rows, self._count)
        said = head.block_digest_start[blocks.start : blocks.stop + 1]
        block = rows // head.block_rows
        start = said[block] + before[rows] - before[of_block[block]]
        stop = said[block] + before[rows + 1] - before[of_block[block]]
        fits = np.diff(before[of_block]) == np.diff(said)
        if np.any(~fits & self._needed) or np.any(start < said[block]) or np.any(stop > said[block + 1]):
            raise FormatError(
                f"{head.where}: of the chunks {self._first}:{self._first + self._count} some have more or "
                f"fewer digests than blocks. The index is damaged; load another checkpoint.",
                path=head.where,
            )
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


def digests_of(store: Store, head: IndexHead, blocks: range) -> npt.NDArray[np.uint64]:
    """Read neighbouring blocks of digests.

    Raises:
        IntegrityError: one does not have the digest that the head has of it.
    """
    span, size = head.rows["digest"], head.block_digests
    begin = blocks.start * size
    digests = np.empty(min(blocks.stop * size, span.shape[0]) - begin, np.uint64)
    data = digests.data.cast("B")
    store.read_into(head.name, span.offset_bytes + begin * 8, data)
    wrong = np.flatnonzero(block_digests(data, size * 8) != head.digest_digests[blocks.start : blocks.stop])
    if wrong.size:
        low = span.offset_bytes + (begin + int(wrong[0]) * size) * 8
        raise _differs(head, low, size * 8, span.offset_bytes + span.nbytes)
    return digests


def _differs(head: IndexHead, low: int, nbytes: int, stop: int) -> IntegrityError:
    return IntegrityError(
        f"{head.where}: the bytes {low}:{min(low + nbytes, stop)} are not those that were saved (their "
        f"digest differs). The file is damaged; load another checkpoint.",
        path=head.where,
    )
