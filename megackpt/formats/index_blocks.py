"""Blocks of an index: read, checked against their digests, and searched.

Owns what is read in one request. Which blocks are needed is `index_reader`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.index_head import IndexHead, Marks
from megackpt.formats.index_layout import ROW_COLUMNS
from megackpt.geometry import Ints
from megackpt.metadata import block_counts
from megackpt.storage import Store, block_digests


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
    """Neighbouring blocks of rows, read column by column; those that are needed are checked.

    needed says which of the blocks these are; buffers are used again by the next one.

    Raises:
        IntegrityError: a block does not have the digest that the head has of it.
    """

    def __init__(
        self, store: Store, head: IndexHead, blocks: range, needed: Marks, buffers: dict[str, bytearray]
    ) -> None:
        self._head, self._blocks, self._needed = head, blocks, needed
        self._first = blocks.start * head.block_rows
        self._count = min(blocks.stop * head.block_rows, int(head.first_row[-1])) - self._first
        self._columns = {name: self._read(store, name, buffers) for name in ROW_COLUMNS}

    def meeting(self, low: Ints, high: Ints) -> dict[str, Ints]:
        """Return the rows that meet the box of their array, of `[arrays, dims]`, from low to high.

        They come as `ROW_COLUMNS`, `array`, and `digest_start`: where their digests begin.
        """
        rows, array = self._reaching(low[:, 0], high[:, 0])
        start, shape = self._columns["start"], self._columns["shape"]
        for d in range(low.shape[1]):
            begin = start[rows, d].astype(np.int64)
            meets = (begin < high[array, d]) & (begin + shape[rows, d] > low[array, d])
            rows, array = rows[meets], array[meets]
        taken = {name: values[rows].astype(np.int64) for name, values in self._columns.items()}
        return {"array": array, "digest_start": self._digest_start(rows), **taken}

    def _read(self, store: Store, name: str, buffers: dict[str, bytearray]) -> npt.NDArray[np.integer[Any]]:
        head, span = self._head, self._head.rows[name]
        nbytes, block_nbytes = self._count * span.row_nbytes, head.block_rows * span.row_nbytes
        if len(buffers.get(name, b"")) < nbytes:
            buffers[name] = bytearray(nbytes)
        data = memoryview(buffers[name])[:nbytes]
        begin = span.offset_bytes + self._first * span.row_nbytes
        store.read_into(head.name, begin, data)
        said = head.row_digests[self._blocks.start : self._blocks.stop, ROW_COLUMNS.index(name)]
        wrong = np.flatnonzero((block_digests(data, block_nbytes) != said) & self._needed)
        if wrong.size:
            raise _differs(head, begin + int(wrong[0]) * block_nbytes, block_nbytes, begin + nbytes)
        return np.frombuffer(data, span.dtype).reshape(self._count, *span.shape[1:])

    def _reaching(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the rows of needed blocks that may meet ranges along dim 0, and their arrays.

        Looks at every row, and so only at where each begins, in the dtype of the file.
        """
        first_row, stop = self._head.first_row, self._first + self._count
        one = int(np.searchsorted(first_row, self._first, side="right")) - 1
        last = int(np.searchsorted(first_row, stop, side="left"))
        ends = np.clip(first_row[one : last + 1], self._first, stop)
        counts = ends[1:] - ends[:-1]
        start = self._columns["start"][:, 0]
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

    def _digest_start(self, rows: Ints) -> Ints:
        """Return where the digests of these rows begin.

        Raises:
            FormatError: a block has not the digests that its rows need.
        """
        head, blocks = self._head, self._blocks
        ends = np.cumsum(block_counts(self._columns["nbytes"].astype(np.int64)))
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
