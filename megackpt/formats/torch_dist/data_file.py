"""Data files: items one after the other.

Owns what one rank writes: the cut of its rows into rectangles, their spread over files, and the layout and
writing of each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megackpt.formats.strategy import ChunkParts
from megackpt.formats.torch_dist.item import ALIGNMENT, frame_of, stream
from megackpt.geometry import Ints, rectangles_of
from megackpt.metadata import DIGEST_BLOCK_BYTES, OBJECT, ChunkTable, itemsizes
from megackpt.storage import BlockDigester, Store


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Rows cut into rectangles, one item each, in the order of the rows.

    Attributes:
        row: position of the row among the rows, `[n]`.
        table: the rectangles, `[n]`.
    """

    row: Ints
    table: ChunkTable


def items_of(table: ChunkTable, rows: Ints) -> Items:
    """Cut rows into rectangles: DCP knows no other chunks. Each is contiguous in the bytes of its row."""
    chunks = table.take(rows)
    cut = rectangles_of(chunks.shape, chunks.flat_start, chunks.flat_stop)
    numel = cut.shape.prod(axis=1)
    width = itemsizes(table.arrays)[chunks.array[cut.row]]
    return Items(
        cut.row,
        ChunkTable(
            table.arrays,
            chunks.array[cut.row],
            chunks.start[cut.row] + cut.start,
            cut.shape,
            np.zeros(len(cut.row), np.int64),
            numel,
            np.where(width > 0, numel * width, chunks.nbytes[cut.row]),
        ),
    )


def balanced(nbytes: Ints, bins: int) -> list[Ints]:
    """Spread rows over bins, largest first, each to the one with the fewest bytes; each bin ascending."""
    members: list[list[int]] = [[] for _ in range(min(bins, len(nbytes)))]
    load = [0] * len(members)
    for row in np.argsort(-nbytes, kind="stable").tolist():
        least = load.index(min(load))
        members[least].append(row)
        load[least] += int(nbytes[row])
    return [np.array(sorted(m), np.int64) for m in members]


class DataFile:
    """One data file: the items of some rows one after the other, each aligned."""

    def __init__(self, table: ChunkTable, item: Ints, rows: list[tuple[int, list[int]]]) -> None:
        self.item = item  # which items it holds, in its order
        self._rows = rows  # (row of the plan, positions in `item`)
        self._table = table
        frames = [_frame(table, i) for i in item.tolist()]
        self._frames = frames
        self.length = np.array([f[2] for f in frames], np.int64)
        ends = np.cumsum(-(-self.length // ALIGNMENT) * ALIGNMENT)
        self.start = ends - (-(-self.length // ALIGNMENT) * ALIGNMENT)
        self.raw = self.start + np.array([f[1] for f in frames], np.int64)
        self.digests: list[Any] = []

    @classmethod
    def of(cls, items: Items, rows: Ints, members: Ints) -> DataFile:
        """Lay out the items of the rows at these positions."""
        first = np.searchsorted(items.row, members)
        last = np.searchsorted(items.row, members, side="right")
        chosen: list[int] = []
        of_row = []
        for member, a, b in zip(members.tolist(), first.tolist(), last.tolist(), strict=True):
            of_row.append((int(rows[member]), list(range(len(chosen), len(chosen) + b - a))))
            chosen += range(a, b)
        return cls(items.table, np.array(chosen, np.int64), of_row)

    def write(self, store: Store, name: str, parts: ChunkParts) -> None:
        """Write all of it, and keep the digests of the tensors' bytes."""
        total = int(self.start[-1] + self.length[-1])
        with store.open_writer(name, total) as writer:
            position = 0
            in_order = parts.in_order([row for row, _ in self._rows])
            for (_, items), of_row in zip(self._rows, in_order, strict=True):
                rest = _RowReader(of_row)
                for at in items:
                    for part in self._item(at, rest, position):
                        writer.write(part)
                    position = int(self.start[at] + self.length[at])

    def _item(self, at: int, rest: _RowReader, position: int) -> Iterator[memoryview]:
        item = int(self.item[at])
        if position < self.start[at]:
            yield memoryview(bytes(int(self.start[at]) - position))
        digester = BlockDigester(DIGEST_BLOCK_BYTES)

        def digested() -> Iterator[memoryview]:
            for part in rest.take(int(self._table.nbytes[item])):
                digester.update(part)
                yield part

        frame = self._frames[at][0]
        yield from digested() if frame is None else stream(frame, digested())
        self.digests.append(digester.result())


def _frame(table: ChunkTable, item: int) -> tuple[Any, int, int]:
    """Return the frame of an item (None: it is an object), where its data begins, and its length."""
    spec = table.arrays[int(table.array[item])]
    if spec.dtype == OBJECT:
        return None, 0, int(table.nbytes[item])
    frame = frame_of(spec.dtype, tuple(table.shape[item, : len(spec.global_shape)].tolist()))
    return frame, len(frame.head), frame.length


class _RowReader:
    """The bytes of a row, taken in parts."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self._open = memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next nbytes bytes."""
        while nbytes:
            if not len(self._open):
                self._open = memoryview(next(self._parts)).cast("B")
            part, self._open = self._open[:nbytes], self._open[nbytes:]
            nbytes -= len(part)
            yield part
