"""Staging memory that a rank and its writer process share, and the copy of a state into it.

It is a ring buffer: position p of a stream lies at byte `p % capacity`, so a stream of any length passes
through it. Its users keep track of the positions up to which they have written and read. What a rank writes
is one such stream: its rows, in their order.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megackpt.engine.data.device_copies import ByteArray, ByteSource, Downloads, pin, unpin
from megackpt.errors import StorageError
from megackpt.ground.notices import notice
from megackpt.plans.geometry import Ints

log = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
_ROW_ALIGNMENT = 64
_STEP_BYTES = 64 << 20  # memory is allocated in such steps, without the interpreter lock


class StagingMemory:
    """Anonymous shared memory. It has no name, so the system frees it with its last user.

    Attributes:
        descriptor: file descriptor by which another process maps it.
    """

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self._array = np.zeros(0, np.uint8)
        self._is_pinned, self._can_pin = False, True

    @property
    def nbytes(self) -> int:
        """Its size in bytes, a multiple of the page size."""
        return self._array.size

    @property
    def array(self) -> ByteArray:
        """All bytes of the memory, `[nbytes]`."""
        return self._array

    def resize(self, nbytes: int) -> None:
        """Change the size, and touch all pages: a first copy into untouched pages is 10 times slower.

        The content is lost. Nobody may use the memory during the call. Any thread may call this.

        Raises:
            StorageError: there is not enough memory.
        """
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if size == self.nbytes:
            return
        # The mapping ends first: to touch it after the file is truncated would kill this process by SIGBUS.
        self._unmap()
        try:
            os.ftruncate(self.descriptor, 0)  # free the old memory before the new is allocated
            if size > _available_bytes():  # the system would kill processes instead of reporting an error
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            for start in range(0, size, _STEP_BYTES):
                os.posix_fallocate(self.descriptor, start, min(_STEP_BYTES, size - start))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
            raise StorageError(
                f"{size:,} bytes of shared memory for staging cannot be allocated ({error.strerror}). Give "
                f"AsyncOptions.staging_bytes a smaller number: a larger state goes through it in waves."
            ) from error
        self._array = map_memory(self.descriptor, size, writable=True)
        # The pages exist since they were allocated, where a lack of memory is an error. To touch them only
        # maps them into this process, so that the first copy meets no page faults.
        for start in range(0, size, _STEP_BYTES):
            self._array[start : start + _STEP_BYTES : PAGE_BYTES] = 0

    def pin(self, device: torch.device) -> None:
        """Pin the memory until its size changes: CUDA devices copy into it at the speed of their links.

        If the system does not allow it, this logs one warning, and copies are slower. Nobody may resize the
        memory during the call.

        Args:
            device: a CUDA device that this process uses.
        """
        if self._is_pinned or not self._can_pin or not self.nbytes:
            return
        self._is_pinned = True  # first: after an interrupt it is rather unpinned in vain than not at all
        try:
            pin(self._array, device)
        except RuntimeError as error:
            self._is_pinned = self._can_pin = False
            notice(
                log,
                f"{self.nbytes:,} bytes of staging memory cannot be pinned ({error}), so asynchronous saves "
                f"of CUDA tensors stall training longer. Raise the limit of locked memory (ulimit -l), or "
                f"give AsyncOptions.staging_bytes a smaller number.",
            )

    def close(self) -> None:
        """Release the memory. Views of `array` stay valid."""
        self._unmap()
        descriptor, self.descriptor = self.descriptor, -1  # first: so that it is closed only once
        if descriptor >= 0:
            os.close(descriptor)

    def _unmap(self) -> None:
        array, self._array = self._array, np.zeros(0, np.uint8)
        is_pinned, self._is_pinned = self._is_pinned, False
        if is_pinned:
            unpin(array)


def map_memory(descriptor: int, nbytes: int, *, writable: bool) -> ByteArray:
    """Return the memory of a descriptor, `[nbytes]`; it is unmapped when nothing refers to the array."""
    if not nbytes:
        return np.zeros(0, np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
    if hasattr(mmap, "MADV_DONTFORK"):  # forked children, of data loaders for example, must not keep it
        mapped.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapped, np.uint8)


def ring_ranges(start: int, stop: int, *, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes of a ring that hold positions [start, stop) of a stream. Pure.

    >>> list(ring_ranges(6, 14, capacity=10))
    [(6, 10), (0, 4)]
    """
    while start < stop:
        low = start % capacity
        high = min(low + stop - start, capacity)
        yield low, high
        start += high - low


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Where rows lie in a stream that starts with them.

    Attributes:
        start: position of each row, `[n]`, a multiple of 64: elements of any dtype are aligned.
        nbytes: length of each row in bytes, `[n]`.
        stop: position after the last row, rounded up to a multiple of 64.
    """

    start: Ints
    nbytes: Ints
    stop: int


def lay_out_rows(nbytes: Ints) -> RowLayout:
    """Lay out rows of these lengths in bytes one after the other. Pure."""
    padded = -(-nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    ends = np.cumsum(padded)
    return RowLayout(ends - padded, nbytes, int(ends[-1]) if len(ends) else 0)


def _available_bytes() -> float:
    """Return how much memory is available without swapping; infinity if the system does not say."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return float("inf")


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("megackpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux: a file without a name
        return os.dup(file.fileno())


class RowSource(Protocol):
    """The bytes of rows of a rank, in host memory or on devices."""

    def sources(self, rows: Sequence[int]) -> Iterator[Iterator[ByteSource]]:
        """Yield the parts of each row, each valid until the next one is taken and its copies are done."""


class StreamReader(Protocol):
    """The process that reads the stream, as the process that writes it sees it."""

    def room_from(self, position: int) -> int:
        """Return up to which position the stream may be written; wait until that is beyond position.

        Raises:
            StreamClosedError: the reader has failed.
        """

    def report_staged(self, position: int) -> None:
        """Report to the reader that the stream is written up to a position."""


class StreamClosedError(Exception):
    """The reader has failed, so nobody needs the rest of the stream. The reader reports its own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """The range of a stream that has the rows of one save.

    Attributes:
        start: position of its first byte.
        layout: where the rows lie, from start on.
    """

    start: int
    layout: RowLayout

    @property
    def stop(self) -> int:
        """Position after its last byte."""
        return self.start + self.layout.stop


def copy_rows(
    memory: ByteArray, target: StreamRange, rows: Sequence[int], source: RowSource, reader: StreamReader
) -> None:
    """Copy rows into a ring of memory, `[capacity]`; if they do not fit, wait for the reader to free memory.

    If all rows fit, the copy is reported once, at its end: a reader that began earlier would take processor
    time from the copy. If they do not fit, progress is reported after each quarter of the memory.

    Raises:
        StreamClosedError: see `StreamReader`.
        CheckpointError: raised by source.
    """
    if not rows:
        # The writer process receives the job with the first report. It has to take part in the collectives of
        # the save, even with nothing to write.
        reader.report_staged(target.stop)
        return
    free_until = reader.room_from(target.start)
    reported = target.start
    starts = (target.layout.start + target.start).tolist()
    # When the block is left, also by an error, no device writes into the memory any more.
    with Downloads() as downloads:
        for position, parts in zip(starts, source.sources(rows), strict=True):
            for data in parts:
                while len(data):
                    is_full = free_until <= position
                    if is_full or (free_until < target.stop and position - reported >= memory.size // 4):
                        downloads.wait()
                        reader.report_staged(position)
                        reported = position
                    if is_full:  # the reader can only free the staged bytes
                        free_until = reader.room_from(position)
                    count = min(len(data), free_until - position)
                    _copy(downloads, memory, position, data[:count])
                    position, data = position + count, data[count:]
    reader.report_staged(target.stop)


def _copy(downloads: Downloads, memory: ByteArray, position: int, data: ByteSource) -> None:
    done = 0
    for low, high in ring_ranges(position, position + len(data), capacity=memory.size):
        downloads.copy(data[done : done + high - low], memory[low:high])
        done += high - low
