"""Digests of whole arrays, put together from chunks that come in any order and are cut in any way.

Owns what such a digest is: CRC-64/NVME of the elements of an array, little-endian, in row-major order; and
how the bytes of a chunk contribute to it. A contribution is the value of the array with zeros everywhere
else; those of chunks that together are the array are combined by XOR.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from megackpt.geometry import BoxRanges, box_ranges
from megackpt.metadata import DTYPES, OBJECT, ChunkTable
from megackpt.storage.crc64 import Crc64

Contributions = npt.NDArray[np.uint64]
"""Of each chunk of a table, `[n]`."""

_AT_A_TIME = 1 << 16  # runs whose values wait for being put together
_SHORT_BYTES = 64 * 1024


class ArrayDigester:
    """Digests chunks of a table, each on its own. Safe for several threads.

    Raises:
        MissingExtraError: the library that it needs is not installed.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._crc = Crc64()

    def begin(self, row: int, *, start: int = 0) -> ChunkDigest | None:
        """Return what takes the bytes of a chunk, from byte `start` of it on; None for an object."""
        table = self._table
        spec = table.arrays[int(table.array[row])]
        if spec.dtype == OBJECT:
            return None
        dims = len(spec.global_shape)
        itemsize = DTYPES[spec.dtype].itemsize
        box = table.start[row, :dims].tolist(), table.shape[row, :dims].tolist()
        runs = box_ranges(*box, spec.global_shape, itemsize=itemsize)
        begin = int(table.flat_start[row]) * itemsize + start
        return ChunkDigest(self._crc, runs, begin=begin, array_nbytes=spec.nbytes)

    def combined(self, contributions: Contributions, keys: Collection[str]) -> dict[str, int]:
        """Return the digests of some arrays, from the contributions of all chunks."""
        table = self._table
        values = np.zeros(len(table.arrays), np.uint64)
        np.bitwise_xor.at(values, table.array, contributions)
        return {
            spec.key: self._crc.finished(value, spec.nbytes)
            for spec, value in zip(table.arrays, values.tolist(), strict=True)
            if spec.dtype != OBJECT and spec.key in keys
        }


class ChunkDigest:
    """Takes bytes of a chunk, in order, and returns their contribution. For one thread.

    A run of which only a part is there counts as if the rest of it were zeros.
    """

    def __init__(self, crc: Crc64, runs: BoxRanges, *, begin: int, array_nbytes: int) -> None:
        self._crc, self._runs, self._array_nbytes = crc, runs, array_nbytes
        self._at = begin  # in the bytes of the box
        self._first = begin // runs.nbytes  # of the runs that wait
        self._waiting: list[Contributions] = []
        self._count = 0
        self._open = 0  # of the run that has begun
        self._value = 0

    @property
    def has_short_runs(self) -> bool:
        """Whether there are so many calls for the bytes that several threads only hinder each other.

        Each lets go of the interpreter's lock for a few microseconds, and threads then fight for it.
        """
        return bool(self._runs.extents) and self._runs.nbytes < _SHORT_BYTES

    def update(self, data: memoryview) -> None:
        """Take the next bytes, one or more."""
        if not self._runs.extents:
            self._open = self._crc.of(data, self._open)
            self._at += len(data)
            return
        length = self._runs.nbytes
        if inside := self._at % length:
            head, data = data[: length - inside], data[length - inside :]
            self._open = self._crc.of(head, self._open)
            self._at += len(head)
            if self._at % length:
                return
            self._add(np.array([self._open], np.uint64))
            self._open = 0
        whole = len(data) // length * length
        if whole:
            self._add(self._crc.of_each(data[:whole], length))
        if whole < len(data):
            self._open = self._crc.of(data[whole:])
        self._at += len(data)

    def result(self) -> int:
        """Return the contribution of all bytes that were taken; there are none to come."""
        if not self._runs.extents:
            return self._crc.shifted(self._open, self._array_nbytes - self._runs.first - self._at)
        if inside := self._at % self._runs.nbytes:
            self._add(np.array([self._crc.shifted(self._open, self._runs.nbytes - inside)], np.uint64))
        self._put_together()
        return self._value

    def _add(self, values: Contributions) -> None:
        self._waiting.append(values)
        self._count += len(values)
        if self._count >= _AT_A_TIME:
            self._put_together()

    def _put_together(self) -> None:
        if self._count:
            values = np.concatenate(self._waiting)
            self._place(values, self._first, len(self._runs.extents))
            self._first += self._count
            self._waiting, self._count = [], 0

    def _place(self, values: Contributions, first: int, dims: int) -> None:
        """Take values of runs that follow each other, from `first` on, in the order of so many leading dims.

        Along the other dims they are put together already, and stand where the last one of these ends.
        """
        runs = self._runs
        extent, stride = runs.extents[dims - 1], runs.strides[dims - 1]
        head = -first % extent  # before the next whole row
        if first // extent == (first + len(values) - 1) // extent:
            (value,) = self._crc.fold(values[None], stride).tolist()
            self._take(value, first + len(values) - 1, dims)
            return
        whole = (len(values) - head) // extent
        tail = head + whole * extent
        if head:
            self._place(values[:head], first, dims)
        if whole:
            rows = self._crc.fold(values[head:tail].reshape(whole, extent), stride)
            self._place(rows, (first + head) // extent, dims - 1)
        if tail < len(values):
            self._place(values[tail:], first + tail, dims)

    def _take(self, value: int, last: int, dims: int) -> None:
        """Add a value that stands at the end of the last run of a place along so many leading dims."""
        run = (last + 1) * math.prod(self._runs.extents[dims:]) - 1
        end = self._runs.begin_of(run) + self._runs.nbytes
        self._value ^= self._crc.shifted(value, self._array_nbytes - end)
