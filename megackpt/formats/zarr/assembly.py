"""Writing the rows of a plan into files of chunks.

A file is assembled in a buffer if several rows, or several ranks one after the other, write parts of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import StorageError
from megackpt.formats.strategy import ChunkParts
from megackpt.formats.zarr.array_codec import ArrayCodec, Elements
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.formats.zarr.rounds import Rounds, TouchedFiles
from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store

BUFFERED_BYTES = 512 * 1024 * 1024
"""Memory for unfinished files. If they need more, the oldest is written as it is, and read again later."""


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """How a plan is written; the same on all ranks.

    Attributes:
        plan: who writes which row.
        arrays: how each array of the plan is stored; None for arrays of objects.
        touches: which rows write parts of which files.
        rounds: the round of each row.
    """

    plan: SavePlan
    arrays: Sequence[ZarrArray | None]
    touches: TouchedFiles
    rounds: Rounds


@dataclass(slots=True)
class _OpenFile:
    array: int
    cell: tuple[int, ...]
    elements: Elements


class Assembler:
    """Writes the rows of this rank in one round."""

    def __init__(self, store: Store, writing: WritePlan) -> None:
        self._store = store
        self._writing = writing
        self._codecs: dict[int, ArrayCodec] = {}
        self._open: dict[int, _OpenFile] = {}  # by number of the file; oldest first
        self._written: set[int] = set()

    def write(self, rows: Ints, parts: ChunkParts) -> None:
        """Write rows of tensors. All their files are written when this returns."""
        files = {int(row): self._writing.touches.files_of(int(row)).tolist() for row in rows}
        # How many of the rows are still to be written into each file: the last one finishes it.
        left = Counter(file for touched in files.values() for file in touched)
        for row, touched in files.items():
            self._add(row, parts, left)
            for file in touched:
                left[file] -= 1
                if not left[file]:
                    self._finish(file)
            # Unfinished files are written early if they need too much memory; `_opened` reads them again.
            while sum(f.elements.nbytes for f in self._open.values()) > BUFFERED_BYTES:
                self._finish(next(iter(self._open)))

    def _add(self, row: int, parts: ChunkParts, left: Counter[int]) -> None:
        table = self._writing.plan.table
        number = int(table.array[row])
        codec = self._codec(number)
        array = codec.array
        # Keep the iterator until all is written: the elements may be in the memory of its last part.
        row_parts = parts(row)
        elements = gathered(row_parts, int(table.nbytes[row])).view(codec.dtype)
        first = int(self._writing.touches.first_file[number])
        for start, shape, block in _blocks(self._writing.plan, row, elements, len(array.spec.global_shape)):
            stop = [a + n for a, n in zip(start, shape, strict=True)]
            grid = array.grid.chunk
            ranges = [range(a // c, -(-b // c)) for a, b, c in zip(start, stop, grid, strict=True)]
            # In each file that the rectangle touches: `[low, high)` is the common part, `overlap` its
            # elements.
            for cell in product(*ranges):
                region = array.region(cell)
                low = [max(a, r.start) for a, r in zip(start, region, strict=True)]
                high = [min(b, r.stop) for b, r in zip(stop, region, strict=True)]
                overlap = block[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
                file = first + _linear(cell, array.file_extents)
                whole = all((a, b) == (r.start, r.stop) for a, b, r in zip(low, high, region, strict=True))
                # The row has all elements of the file, and no row that follows changes it: no buffer is
                # needed.
                if whole and left[file] == 1:
                    self._put(file, codec, cell, overlap)
                    continue
                inside = tuple(
                    slice(a - r.start, b - r.start) for a, b, r in zip(low, high, region, strict=True)
                )
                self._opened(file, number, cell, row).elements[inside] = overlap

    def _opened(self, file: int, number: int, cell: tuple[int, ...], row: int) -> _OpenFile:
        """Return the buffer of a file, with the elements that other rows have written there before."""
        if file not in self._open:
            codec = self._codec(number)
            shape = [r.stop - r.start for r in codec.array.region(cell)]
            rounds = self._writing.rounds
            now = int(rounds.round[row])
            # A file begins as zeros, unless an earlier round, or this rank for want of memory, has written
            # parts of it.
            is_new = file not in self._written and rounds.first_round.get(file, now) == now
            elements = np.zeros(shape, codec.dtype) if is_new else self._read(codec, cell).copy()
            self._open[file] = _OpenFile(number, cell, elements)
        return self._open[file]

    def _read(self, codec: ArrayCodec, cell: tuple[int, ...]) -> Elements:
        name = codec.array.path + codec.array.leaf(cell)
        try:
            nbytes = self._store.size(name)
        except StorageError as error:
            raise StorageError(
                f"{self._store.location}/{name}: another rank has written a part of this file, and this one "
                f"cannot find it ({error}). All ranks must see one file system, and nobody else may change "
                f"the directory meanwhile.",
                key=codec.array.spec.key,
                path=name,
            ) from error
        return codec.decode(cell, self._store.read(name, max_bytes=nbytes))

    def _finish(self, file: int) -> None:
        done = self._open.pop(file, None)
        if done is not None:
            self._put(file, self._codec(done.array), done.cell, done.elements)

    def _put(self, file: int, codec: ArrayCodec, cell: tuple[int, ...], elements: Elements) -> None:
        put_file(self._store, codec.array.path + codec.array.leaf(cell), codec.encode(cell, elements))
        self._written.add(file)

    def _codec(self, number: int) -> ArrayCodec:
        """Return the codec of an array. Codecs of the current array and of unfinished files are kept."""
        # A codec has memory of its own, so only those are kept that are still needed.
        if number not in self._codecs:
            array = self._writing.arrays[number]
            assert array is not None  # rows of objects are not written here
            needed = {f.array for f in self._open.values()}
            self._codecs = {n: codec for n, codec in self._codecs.items() if n in needed}
            self._codecs[number] = ArrayCodec(array)
        return self._codecs[number]


def put_file(store: Store, name: str, data: bytes | memoryview) -> None:
    """Write a file; its content is durable when this returns, its name after `store.sync()`."""
    with store.open_writer(name, len(data)) as writer:
        writer.write(memoryview(data))


def gathered(parts: Iterator[memoryview], nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a row: a view of its memory if it has one part, else a copy.

    Valid until another part is taken from the iterator, or the iterator is closed.
    """
    whole: npt.NDArray[np.uint8] | None = None
    at = 0
    for part in parts:
        data: npt.NDArray[np.uint8] = np.frombuffer(part, np.uint8)
        if len(data) == nbytes:
            return data
        if whole is None:
            # Copied part by part: taking the next part overwrites the memory of this one.
            whole = np.empty(nbytes, np.uint8)
        whole[at : at + len(data)] = data
        at += len(data)
    assert whole is not None  # plans have no empty rows
    assert at == nbytes
    return whole


def _blocks(
    plan: SavePlan, row: int, elements: npt.NDArray[Any], dims: int
) -> Iterator[tuple[list[int], list[int], Elements]]:
    """Yield the rectangles of a row: start in the array, shape and elements."""
    table = plan.table
    cut = rectangles_of(table.shape[[row]], table.flat_start[[row]], table.flat_stop[[row]])
    # A rectangle is contiguous in the bytes of its row, and they follow one another.
    position = 0
    for start, shape in zip((cut.start + table.start[row]).tolist(), cut.shape.tolist(), strict=True):
        numel = int(np.prod(shape))
        yield start[:dims], shape[:dims], elements[position : position + numel].reshape(shape[:dims])
        position += numel


def _linear(cell: Sequence[int], extents: Sequence[int]) -> int:
    position = 0
    for i, n in zip(cell, extents, strict=True):
        position = position * n + i
    return position
