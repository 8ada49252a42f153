"""The data files of one rank: its rows cut into rectangles, spread over files, laid out and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from megackpt.formats.strategy import ChunkParts
from megackpt.formats.torch_dist.item import ALIGNMENT, Frame, frame_of, stream
from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, OBJECT, ChunkTable, itemsizes
from megackpt.storage import BlockDigester, Store


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The rectangles of some rows, one item each, in the order of the rows.

    Attributes:
        row: position of the row among the rows, `[n]`.
        table: the rectangles, `[n]`.
    """

    row: Ints
    table: ChunkTable


def items_of(table: ChunkTable, rows: Ints) -> Items:
    """Return the rectangles of rows, as DCP knows no other chunks. Each is contiguous in its row's bytes."""
    chunks = table.take(rows)
    cut = rectangles_of(chunks.shape, chunks.flat_start, chunks.flat_stop)
    # An object is one element without a width: it is one item, of the length of its chunk.
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


def spread_evenly(nbytes: Ints, bins: int) -> list[Ints]:
    """Return the rows of each bin, ascending. Largest rows first, each is put into the emptiest bin."""
    members: list[list[int]] = [[] for _ in range(min(bins, len(nbytes)))]
    load = [0] * len(members)
    for row in np.argsort(-nbytes, kind="stable").tolist():
        least = load.index(min(load))
        members[least].append(row)
        load[least] += int(nbytes[row])
    return [np.array(sorted(m), np.int64) for m in members]


class DataFile:
    """One data file: the items of some rows, one after the other, each aligned."""

    def __init__(self, table: ChunkTable, item: Ints, rows: list[tuple[int, list[int]]]) -> None:
        self.item = item  # numbers of its items, in file order
        self._rows = rows  # (row of the plan, positions in `item`)
        self._table = table
        # A model has many tensors and few shapes, and a frame takes 2 KiB.
        shared = cache(frame_of)
        frames = [_frame(table, i, shared) for i in item.tolist()]
        self._frames = frames
        self.length = np.array([f[2] for f in frames], np.int64)
        ends = np.cumsum(-(-self.length // ALIGNMENT) * ALIGNMENT)
        self.start = ends - (-(-self.length // ALIGNMENT) * ALIGNMENT)
        # Our index has the positions of the tensors' own bytes, `.metadata` those of whole items.
        self.raw = self.start + np.array([f[1] for f in frames], np.int64)
        self.digests: list[Any] = []

    @classmethod
    def of(cls, items: Items, rows: Ints, members: Ints) -> DataFile:
        """Return the layout of a file with the items of the rows at these positions."""
        # Items are listed row by row, so those of a row are neighbours.
        first = np.searchsorted(items.row, members)
        last = np.searchsorted(items.row, members, side="right")
        chosen: list[int] = []
        row_items = []
        for member, a, b in zip(members.tolist(), first.tolist(), last.tolist(), strict=True):
            row_items.append((int(rows[member]), list(range(len(chosen), len(chosen) + b - a))))
            chosen += range(a, b)
        return cls(items.table, np.array(chosen, np.int64), row_items)

    def write(self, store: Store, name: str, parts: ChunkParts) -> None:
        """Write the file, and keep the digests of the tensors' bytes."""
        total = int(self.start[-1] + self.length[-1])
        with store.open_writer(name, total) as writer:
            position = 0
            in_order = parts.in_order([row for row, _ in self._rows])
            for (_, items), row_parts in zip(self._rows, in_order, strict=True):
                reader = _RowReader(row_parts)
                for number in items:
                    for part in self._item(number, reader, position):
                        writer.write(part)
                    position = int(self.start[number] + self.length[number])

    def _item(self, number: int, reader: _RowReader, position: int) -> Iterator[memoryview]:
        """Yield the padding before an item, and its bytes."""
        item = int(self.item[number])
        if position < self.start[number]:
            yield memoryview(bytes(int(self.start[number]) - position))
        # Digests are of the tensor's bytes, which is what a load reads; the frame has a checksum of its own.
        digester = BlockDigester(DIGEST_BLOCK_BYTES)

        def digested() -> Iterator[memoryview]:
            for part in reader.take(int(self._table.nbytes[item])):
                digester.update(part)
                yield part

        frame = self._frames[number][0]
        yield from digested() if frame is None else stream(frame, digested())
        self.digests.append(digester.result())


def _frame(
    table: ChunkTable, item: int, frame_of: Callable[[str, tuple[int, ...]], Frame]
) -> tuple[Any, int, int]:
    """Return the frame of an item, None for an object; where its data begins; and its length."""
    spec = table.arrays[int(table.array[item])]
    if spec.dtype == OBJECT:
        return None, 0, int(table.nbytes[item])
    frame = frame_of(spec.dtype, tuple(table.shape[item, : len(spec.global_shape)].tolist()))
    return frame, len(frame.head), frame.length


class _RowReader:
    """Divides the bytes of a row among its items."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self._rest = memoryview(b"")  # of the current part

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next nbytes bytes."""
        while nbytes:
            if not len(self._rest):
                # The items of a row add up to its length, so there is a next part.
                self._rest = memoryview(next(self._parts)).cast("B")
            part, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(part)
            yield part
