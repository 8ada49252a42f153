"""Digests of whole arrays, computed from chunks in any order and with any boxes.

A digest is the CRC-64/NVME of an array's elements, little-endian, in row-major order. The contribution of a
chunk is the value of the array with zeros everywhere else. CRCs are linear, so the XOR of the contributions
of chunks that tile the array is the value of the array.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import BoxRanges, box_ranges
from megackpt.plans.metadata import DTYPES, OBJECT, ChunkTable
from megackpt.storage.crc64 import Crc64

Contributions = npt.NDArray[np.uint64]
"""The contribution of each chunk of a table, `[n]`."""

_PENDING_RANGES = 1 << 16  # ranges whose values are kept until they are combined
_SHORT_BYTES = 64 * 1024


class ArrayDigester:
    """Digests chunks of a table, each by itself. Safe for several threads.

    Raises:
        MissingExtraError: the library that computes CRCs is not installed.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._crc = Crc64()

    def begin(self, row: int, *, start: int = 0) -> ChunkDigest | None:
        """Return a digest that takes the bytes of a chunk from byte `start` on; None for an object."""
        table = self._table
        spec = table.arrays[int(table.array[row])]
        if spec.dtype == OBJECT:
            return None
        dims = len(spec.global_shape)
        itemsize = DTYPES[spec.dtype].itemsize
        box = table.start[row, :dims].tolist(), table.shape[row, :dims].tolist()
        ranges = box_ranges(*box, spec.global_shape, itemsize=itemsize)
        begin = int(table.flat_start[row]) * itemsize + start
        return ChunkDigest(self._crc, ranges, begin=begin, array_nbytes=spec.nbytes)

    def combine(self, contributions: Contributions, keys: Collection[str]) -> dict[str, int]:
        """Return the digests of the arrays with these keys, from the contributions of all chunks."""
        table = self._table
        values = np.zeros(len(table.arrays), np.uint64)
        # `at` takes in every chunk of an array; plain indexing would keep the last one only.
        np.bitwise_xor.at(values, table.array, contributions)
        return {
            spec.key: self._crc.finished(value, spec.nbytes)
            for spec, value in zip(table.arrays, values.tolist(), strict=True)
            if spec.dtype != OBJECT and spec.key in keys
        }


class ChunkDigest:
    """Takes the bytes of a chunk in order, and computes their contribution. For one thread.

    A range of the box of which only a part comes counts as if the rest were zeros.
    """

    def __init__(self, crc: Crc64, ranges: BoxRanges, *, begin: int, array_nbytes: int) -> None:
        self._crc, self._ranges, self._array_nbytes = crc, ranges, array_nbytes
        self._position = begin  # in the bytes of the box
        self._pending: list[Contributions] = []  # values of ranges that are complete, and not combined yet
        self._pending_count = 0
        self._first_pending = begin // ranges.nbytes  # number of the first of these ranges
        self._open = 0  # value of the range that is not complete yet
        self._value = 0

    @property
    def has_short_ranges(self) -> bool:
        """Whether ranges are so short that several threads only slow each other down.

        Each call of the CRC library releases the interpreter lock for a few microseconds, and threads then
        compete for it.
        """
        return bool(self._ranges.extents) and self._ranges.nbytes < _SHORT_BYTES

    def update(self, data: memoryview) -> None:
        """Take the next bytes, one or more."""
        # The box is one range, so there is nothing to combine: its CRC is open until the end.
        if not self._ranges.extents:
            self._open = self._crc.of(data, self._open)
            self._position += len(data)
            return
        length = self._ranges.nbytes
        # First the rest of the open range, then whole ranges all at once, then the beginning of the next.
        if inside := self._position % length:
            head, data = data[: length - inside], data[length - inside :]
            self._open = self._crc.of(head, self._open)
            self._position += len(head)
            if self._position % length:
                return
            self._add(np.array([self._open], np.uint64))
            self._open = 0
        whole = len(data) // length * length
        if whole:
            self._add(self._crc.of_each(data[:whole], length))
        if whole < len(data):
            self._open = self._crc.of(data[whole:])
        self._position += len(data)

    def result(self) -> int:
        """Return the contribution of all bytes that were taken; no more may follow."""
        if not self._ranges.extents:
            return self._crc.shifted(self._open, self._array_nbytes - self._ranges.first - self._position)
        if inside := self._position % self._ranges.nbytes:
            self._add(np.array([self._crc.shifted(self._open, self._ranges.nbytes - inside)], np.uint64))
        self._combine_pending()
        return self._value

    def _add(self, values: Contributions) -> None:
        # Combined many at a time: a call of the library for each short range takes longer than its bytes.
        self._pending.append(values)
        self._pending_count += len(values)
        if self._pending_count >= _PENDING_RANGES:
            self._combine_pending()

    def _combine_pending(self) -> None:
        if self._pending_count:
            values = np.concatenate(self._pending)
            self._combine(values, self._first_pending, len(self._ranges.extents))
            self._first_pending += self._pending_count
            self._pending, self._pending_count = [], 0

    def _combine(self, values: Contributions, first: int, dims: int) -> None:
        """Combine values of consecutive ranges.

        Args:
            values: one for each range, `[n]`.
            first: number of the first range, in row-major order of the leading dims.
            dims: how many leading dims the ranges are numbered along. Along the other dims they are combined
                already: a value is that of all ranges there, as if the bytes ended where the last of these
                    does.
        """
        ranges = self._ranges
        extent, stride = ranges.extents[dims - 1], ranges.strides[dims - 1]
        head = -first % extent  # values before the first complete row along the innermost of these dims
        # All in one row: combined, they stand at the end of their last range.
        if first // extent == (first + len(values) - 1) // extent:
            (value,) = self._crc.fold(values[None], stride).tolist()
            self._take(value, first + len(values) - 1, dims)
            return
        # Else an incomplete row at each end, and complete rows between, which become one value each and are
        # combined along the next dim outwards.
        whole = (len(values) - head) // extent
        tail = head + whole * extent
        if head:
            self._combine(values[:head], first, dims)
        if whole:
            rows = self._crc.fold(values[head:tail].reshape(whole, extent), stride)
            self._combine(rows, (first + head) // extent, dims - 1)
        if tail < len(values):
            self._combine(values[tail:], first + tail, dims)

    def _take(self, value: int, last: int, dims: int) -> None:
        """Add a value whose bytes end with the range `last`, numbered along so many leading dims."""
        # The zeros after it, up to the end of the array, are a shift.
        last_range = (last + 1) * math.prod(self._ranges.extents[dims:]) - 1
        end = self._ranges.begin_of(last_range) + self._ranges.nbytes
        self._value ^= self._crc.shifted(value, self._array_nbytes - end)
