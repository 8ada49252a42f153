"""Two ways to put a stream of bytes into an open file: around the page cache, or through it.

Owns the background threads and the flushing that make each of them fast. Which one a file gets, and what a
failure does to the file, is up to `writer`.

* Direct: the caller's thread copies into page-aligned buffers, a few threads write full buffers with
  O_DIRECT, and the caller waits only when all buffers are on their way.
* Buffered: straight from the caller's memory, for small files and file systems without O_DIRECT. What is
  written is flushed and dropped from the page cache every few megabytes: filling fresh pages with gigabytes
  that nobody reads again is several times slower than using a few again, and takes memory from the training.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megackpt.arguments import check_count, check_flag
from megackpt.errors import DeclarationError
from megackpt.storage.buffers import BUFFER_BYTES, BufferPool, ByteArray
from megackpt.storage.rawio import ALIGNMENT, write_fully

# Measured on ext4, 1 GiB into fresh pages: 0.35 GB/s without flushing, 0.37 when only asking for early
# write-back, 2.1 when flushing and dropping every 32 MiB; O_DIRECT 2.3.
_FLUSH_EVERY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """How local files are written and read.

    Attributes:
        direct: use O_DIRECT where the file system allows it, to write, and to read what is not cached.
        direct_from_bytes: smaller files go through the page cache, where a single copy is quicker.
        buffer_bytes: size of one staging buffer, a multiple of 4096.
        buffers: staging buffers of one writer; together they hold at most 16 MiB.
        threads: threads of one writer that write full buffers.
    """

    direct: bool = True
    direct_from_bytes: int = 1 << 20
    buffer_bytes: int = BUFFER_BYTES
    buffers: int = 4
    threads: int = 2

    def __post_init__(self) -> None:
        check_flag("direct", self.direct)
        check_count("direct_from_bytes", self.direct_from_bytes, least=0)
        for name in ("buffer_bytes", "buffers", "threads"):
            check_count(name, getattr(self, name))
        if self.buffer_bytes % ALIGNMENT:
            raise DeclarationError(
                f"buffer_bytes is {self.buffer_bytes}; direct I/O needs a multiple of {ALIGNMENT}."
            )
        if self.buffers * self.buffer_bytes > 16 << 20:
            raise DeclarationError(
                f"{self.buffers} buffers of {self.buffer_bytes} bytes exceed the 16 MiB that a writer may "
                "hold. More does not write faster: use fewer or smaller ones."
            )


class Sink(Protocol):
    """Puts bytes into an open file, front to back."""

    def append(self, data: ByteArray) -> None:
        """Take the next bytes; the caller may reuse `data` afterwards."""
        ...

    def finish(self) -> None:
        """Return when the system has all bytes, or raise the OSError of any write."""
        ...

    def stop(self) -> None:
        """Let go of threads and buffers. Nothing touches the file afterwards."""
        ...


class BufferedSink:
    """Through the page cache, straight from the caller's memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0
        self._flushed = 0  # bytes at the front that are on disk and no longer cached

    def append(self, data: ByteArray) -> None:
        """Write `data` at the end."""
        for start in range(0, data.size, _FLUSH_EVERY_BYTES):
            piece = data[start : start + _FLUSH_EVERY_BYTES]
            write_fully(self._descriptor, piece.data, self._offset)
            self._offset += piece.size
            if self._offset - self._flushed >= _FLUSH_EVERY_BYTES:
                self._flush()

    def finish(self) -> None:
        """Nothing is left to do: `append` has handed over everything."""

    def stop(self) -> None:
        """Nothing is held."""

    def _flush(self) -> None:
        os.fdatasync(self._descriptor)
        count = self._offset - self._flushed
        os.posix_fadvise(self._descriptor, self._flushed, count, os.POSIX_FADV_DONTNEED)
        self._flushed = self._offset


class DirectSink:
    """Around the page cache, through a bounded pipeline of staging buffers; the descriptor has O_DIRECT."""

    def __init__(self, descriptor: int, *, options: FileOptions, pool: BufferPool) -> None:
        self._descriptor = descriptor
        self._options = options
        self._pool = pool
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="megackpt-write")
        self._in_flight: deque[tuple[Future[None], ByteArray]] = deque()
        self._filling: ByteArray | None = None
        self._filled = 0  # bytes in the buffer that is being filled
        self._submitted = 0  # bytes of the file before that buffer

    def append(self, data: ByteArray) -> None:
        """Copy `data` into staging buffers and send the full ones on their way."""
        while data.size:
            if self._filling is None:
                self._filling = self._next_buffer()
            count = min(data.size, self._filling.size - self._filled)
            # np.copyto releases the GIL; assigning to a slice of a memoryview would not.
            np.copyto(self._filling[self._filled : self._filled + count], data[:count])
            self._filled += count
            data = data[count:]
            if self._filled == self._filling.size:
                self._submit(self._filled)

    def finish(self) -> None:
        """Write the tail, wait for all writes, cut the padding off."""
        nbytes = self._submitted + self._filled
        if self._filling is not None and self._filled:
            padded = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._filling[self._filled : padded] = 0
            self._submit(padded)
        while self._in_flight:
            self._pool.give(self._await_oldest())
        if self._submitted != nbytes:
            os.ftruncate(self._descriptor, nbytes)

    def stop(self) -> None:
        """Drop writes that have not begun, wait for those that have."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        idle = [buffer for _, buffer in self._in_flight]
        if self._filling is not None:
            idle.append(self._filling)
        self._in_flight.clear()
        self._filling = None
        for buffer in idle:
            self._pool.give(buffer)

    def _next_buffer(self) -> ByteArray:
        if len(self._in_flight) < self._options.buffers:
            return self._pool.take()
        return self._await_oldest()

    def _submit(self, count: int) -> None:
        assert self._filling is not None
        view = self._filling.data[:count]
        write = self._threads.submit(write_fully, self._descriptor, view, self._submitted)
        self._in_flight.append((write, self._filling))
        self._submitted += count
        self._filling, self._filled = None, 0

    def _await_oldest(self) -> ByteArray:
        write, buffer = self._in_flight[0]
        write.result()
        self._in_flight.popleft()
        return buffer
