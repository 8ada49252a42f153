"""Rows of a plan as windows of bounded size, and as parts of arrays that a load reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from megackpt.entities import ShardedTensor
from megackpt.entities.describe import torch_dtype
from megackpt.plans.metadata import ChunkTable
from megackpt.whole.windows import ByteArray

_ALIGNMENT = 16  # bytes: a multiple of the width of every dtype


class Segment(NamedTuple):
    """Bytes `[start, stop)` of a row, at a byte of a window."""

    row: int
    start: int
    stop: int
    at: int


class RowWindow(NamedTuple):
    """Bytes of rows that are read together."""

    segments: tuple[Segment, ...]
    nbytes: int


def row_windows(table: ChunkTable, rows: Sequence[int], buffer_bytes: int) -> Iterator[RowWindow]:
    """Yield the bytes of rows in order, in windows of at most buffer_bytes, and at least 16 bytes."""
    step = max(buffer_bytes // _ALIGNMENT, 1) * _ALIGNMENT
    for_all = zip(rows, table.nbytes[list(rows)].tolist(), strict=True)
    parts = ((row, start, min(start + step, n)) for row, n in for_all for start in range(0, n, step))
    return windows_of(parts, buffer_bytes)


def windows_of(parts: Iterable[tuple[int, int, int]], buffer_bytes: int) -> Iterator[RowWindow]:
    """Yield windows of parts in order, each (row, start, stop), as many at a time as buffer_bytes hold."""
    segments: list[Segment] = []
    filled = 0
    for row, start, stop in parts:
        if segments and filled + stop - start > buffer_bytes:
            yield RowWindow(tuple(segments), filled)
            segments, filled = [], 0
        segments.append(Segment(row, start, stop, filled))
        # A tensor of any dtype may begin where the next segment does.
        filled += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
    if segments:
        yield RowWindow(tuple(segments), filled)


def request_of(table: ChunkTable, segment: Segment, data: ByteArray) -> ShardedTensor:
    """Return a segment as a part of its array, with its bytes of the window as memory."""
    spec = table.arrays[int(table.array[segment.row])]
    dims, dtype = len(spec.global_shape), torch_dtype(spec.dtype)
    first = int(table.flat_start[segment.row])
    memory = torch.from_numpy(data[segment.at : segment.at + segment.stop - segment.start]).view(dtype)
    return ShardedTensor(
        spec.key,
        memory,
        dtype,
        tuple(table.shape[segment.row, :dims].tolist()),
        spec.global_shape,
        tuple(table.start[segment.row, :dims].tolist()),
        flattened_range=slice(
            first + segment.start // dtype.itemsize, first + segment.stop // dtype.itemsize
        ),
    )
