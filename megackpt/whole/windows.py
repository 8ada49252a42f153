"""Parts of arrays, and windows of bytes: the next one is read while the previous one is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.checkpoint.opening import check_arrays_complete, check_readable
from megackpt.engine.data.read import read_tensors
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import ChunkTable
from megackpt.plans.planning import plan_load
from megackpt.storage import Store

ByteArray = npt.NDArray[np.uint8]  # [n]


class SizedWindow(Protocol):
    """What is read together."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...


W = TypeVar("W", bound=SizedWindow)


def window_threads() -> ThreadPoolExecutor:
    """Return the threads that fill windows: two, as a format may write two files at a time.

    They belong to a `with` block of a function, never of a generator. An error that keeps a generator from
    its end leaves it to the garbage collector. That runs in any thread, which may hold a lock of `threading`,
    and there nothing may wait for another thread.
    """
    return ThreadPoolExecutor(2, thread_name_prefix="megackpt-window")


def filled_windows(
    windows: Sequence[W], fill: Callable[[W, ByteArray], None], threads: Executor
) -> Iterator[tuple[W, ByteArray]]:
    """Yield each window with its bytes, which are valid until the next one; that one is read meanwhile.

    Args:
        windows: the windows, in order.
        fill: fills a buffer, which may be longer than the window. It is called by another thread.
        threads: of `window_threads`. A window may still be filled when this iterator has been closed.
    """
    longest = max((window.nbytes for window in windows), default=0)
    buffers = [np.empty(longest, np.uint8) for _ in windows[:2]]
    pending = [threads.submit(fill, windows[0], buffers[0])] if windows else []
    for number, window in enumerate(windows):
        pending.pop().result()
        if number + 1 < len(windows):
            following = number + 1
            pending.append(threads.submit(fill, windows[following], buffers[following % 2]))
        yield window, buffers[number % 2]


# Rows of a plan as windows of bounded size, and as parts of arrays that a load reads. Pure.

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


def windows_of(
    parts: Iterable[tuple[int, int, int]], buffer_bytes: int, *, most: int = sys.maxsize
) -> Iterator[RowWindow]:
    """Yield windows of parts (row, start, stop), in order: as many as buffer_bytes hold, `most` at most."""
    segments: list[Segment] = []
    filled = 0
    for row, start, stop in parts:
        if segments and (filled + stop - start > buffer_bytes or len(segments) == most):
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


# Reading parts of stored arrays into tensors that declare them.

READ_OPTIONS = LoadOptions(threads=4)


def read_parts(
    contents: Contents, tensors: Sequence[ShardedTensor], *, where: str, options: LoadOptions = READ_OPTIONS
) -> None:
    """Fill tensors that declare parts of stored arrays. Local.

    Raises:
        IntegrityError, FormatError, StorageError: the bytes are damaged, or cannot be read.
    """
    requested = describe(tensors, rank=0)
    chunks = contents.chunks_for([requested.table])
    copies = plan_load(requested, chunks.table, where=where)
    read_tensors(chunks, copies, tensors, options)


def check_can_be_read(contents: Contents, keys: Sequence[str], store: Store) -> None:
    """Check that the files of a checkpoint hold every element of some arrays. Local; no chunk is read.

    Raises:
        FormatError: an element is in no file, or an array cannot be loaded.
    """
    check_readable(keys, contents.unreadable, where=store.location)
    check_arrays_complete(store, contents.chunks(sorted(keys)), sorted(keys))
