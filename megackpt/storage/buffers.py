"""Page-aligned buffers for reading and writing files, kept and used again.

They are kept for the life of the process: the first touch of fresh pages costs several times as much as the
copy into them, so buffers made anew for each save would cost more than the digests of all its bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megackpt.storage.rawio import ALIGNMENT

ByteArray = npt.NDArray[np.uint8]  # [n], a view of bytes

BUFFER_BYTES = 4 << 20
"""Size of a buffer of the common pool, and so of the longest request to the system."""

MAX_BORROWED_BYTES = BUFFER_BYTES - 2 * ALIGNMENT
"""Longest range of `Store.borrow`: one buffer, less what alignment may cost at both ends."""

_MAX_IDLE_BUFFERS = 8
_HUGE_PAGE_BYTES = 2 << 20


class BufferPool:
    """Buffers of one size; keeps at most `limit` unused ones. Safe for many threads.

    Buffers of 2 MiB or more begin at multiples of 2 MiB, so that the system can use huge pages for them: a
    request to a disk then has fewer segments.
    """

    def __init__(self, buffer_bytes: int, *, limit: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._limit = limit
        self._idle: list[ByteArray] = []
        self._lock = threading.Lock()

    def take(self) -> ByteArray:
        """Return a buffer, `[buffer_bytes]`, with arbitrary content."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _new_buffer(self.buffer_bytes)

    def give_back(self, buffer: ByteArray) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            if len(self._idle) < self._limit:
                self._idle.append(buffer)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[ByteArray]:
        """Yield a buffer, `[buffer_bytes]`, with arbitrary content; it goes back at the end of the block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def clear(self) -> None:
        """Return unused buffers to the system."""
        with self._lock:
            self._idle.clear()

    def reset_after_fork(self) -> None:
        """Start empty in a forked process, where the lock may be held by a thread that does not exist."""
        self._lock = threading.Lock()
        self._idle = []


COMMON_POOL = BufferPool(BUFFER_BYTES, limit=_MAX_IDLE_BUFFERS)
"""The buffers of this process. It keeps at most 32 MiB; more can be taken, and is freed when given back."""

os.register_at_fork(after_in_child=COMMON_POOL.reset_after_fork)


def _new_buffer(nbytes: int) -> ByteArray:
    # Private, so that a forked process does not write into buffers of its parent; the default is shared.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < _HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    # One huge page more than needed, to have an aligned start somewhere in the first one.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    with contextlib.suppress(AttributeError, OSError):  # a hint, which not every system knows
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = np.frombuffer(memory, np.uint8)
    first = -mapped.ctypes.data % _HUGE_PAGE_BYTES
    return mapped[first : first + nbytes]
