"""Page-aligned buffers that are used again.

Owns the memory through which bytes go to files and come from them. It is kept for the life of the process:
touching fresh pages costs several times the copy into them, so a buffer that each save made anew would cost
more than the digests of all that goes through it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]  # [n], a view of bytes

BUFFER_BYTES = 4 << 20
"""Size of a buffer of the common pool, and so of the longest request to the system."""

_KEPT = 8
_HUGE_PAGE = 2 << 20


class BufferPool:
    """Buffers of one size; keeps at most `limit` unused ones. Safe for many threads.

    They begin at multiples of 2 MiB if they are as large, so that the system can use huge pages for them: a
    request to a disk is then made of few parts.
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
        return _fresh(self.buffer_bytes)

    def give(self, buffer: ByteArray) -> None:
        """Take a buffer back."""
        with self._lock:
            if len(self._idle) < self._limit:
                self._idle.append(buffer)

    @contextlib.contextmanager
    def lend(self) -> Iterator[ByteArray]:
        """Yield a buffer, `[buffer_bytes]`, with arbitrary content until the end of the block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)

    def clear(self) -> None:
        """Return unused buffers to the system."""
        with self._lock:
            self._idle.clear()

    def renew(self) -> None:
        """Begin anew, in a process just forked: the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        self._idle = []


COMMON_POOL = BufferPool(BUFFER_BYTES, limit=_KEPT)
"""The buffers of this process. It keeps at most 32 MiB; what is taken beyond that is not kept."""

os.register_at_fork(after_in_child=COMMON_POOL.renew)


def _fresh(nbytes: int) -> ByteArray:
    # Private, so that a forked process does not write into buffers of its parent; the default is shared.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < _HUGE_PAGE:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
    with contextlib.suppress(AttributeError, OSError):  # a hint, which not every system knows
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _HUGE_PAGE
    return whole[first : first + nbytes]
