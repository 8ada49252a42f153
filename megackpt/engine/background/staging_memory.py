"""Staging memory that a rank and its writer process share.

Owns the memory, and where the bytes of a stream lie in it: position p of the stream at byte `p % capacity`,
so that a stream of any length passes through. Who has written or read up to where is up to its users.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import StorageError
from megackpt.geometry import Ints

ByteArray = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE
_ROW_ALIGNMENT = 64
_STEP_BYTES = 64 << 20  # memory is made so much at a time, without the interpreter lock


class StagingMemory:
    """Anonymous shared memory behind one descriptor. It has no name, so nothing of it outlives its users.

    Attributes:
        descriptor: what another process maps it by.
    """

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self._memory = np.zeros(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """How large it is: a multiple of the page size."""
        return self._memory.size

    @property
    def memory(self) -> ByteArray:
        """All of it, `[nbytes]`."""
        return self._memory

    def resize(self, nbytes: int) -> None:
        """Make it as large, and its pages present: the first copy into fresh memory would be 10 times slower.

        What was in it is lost; nobody may use it meanwhile. Any thread may call it.

        Raises:
            StorageError: there is not as much memory.
        """
        whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if whole == self.nbytes:
            return
        self._memory = np.zeros(0, np.uint8)
        try:
            os.ftruncate(self.descriptor, 0)  # let go of the old before the new is taken
            if whole > _available_bytes():  # the system would end processes rather than refuse
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            for start in range(0, whole, _STEP_BYTES):
                os.posix_fallocate(self.descriptor, start, min(_STEP_BYTES, whole - start))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
            raise StorageError(
                f"{whole:,} bytes of shared memory for staging cannot be had ({error.strerror}). Give "
                f"AsyncOptions.staging_bytes a smaller number: a larger state goes through it in waves."
            ) from error
        self._memory = map_memory(self.descriptor, whole, writable=True)
        for start in range(0, whole, _STEP_BYTES):
            self._memory[start : start + _STEP_BYTES : PAGE_BYTES] = 0

    def close(self) -> None:
        """Let go of it. Views of `memory` stay valid."""
        self._memory = np.zeros(0, np.uint8)
        descriptor, self.descriptor = self.descriptor, -1  # first: see `storage.beneath`, closed once only
        if descriptor >= 0:
            os.close(descriptor)


def map_memory(descriptor: int, nbytes: int, *, writable: bool) -> ByteArray:
    """Return the memory behind a descriptor, `[nbytes]`; it is unmapped when nobody refers to it."""
    if not nbytes:
        return np.zeros(0, np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
    if hasattr(mmap, "MADV_DONTFORK"):  # forked children, of data loaders say, are not to keep it
        mapped.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapped, np.uint8)


def ring_ranges(start: int, stop: int, *, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield where positions [start, stop) of a stream lie in a ring, as ranges of its bytes. Pure.

    >>> list(stretches(6, 14, capacity=10))
    [(6, 10), (0, 4)]
    """
    while start < stop:
        low = start % capacity
        high = min(low + stop - start, capacity)
        yield low, high
        start += high - low


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Where rows lie in a stream that begins with them.

    Attributes:
        start: position of each row, `[n]`, a multiple of 64: elements of any dtype are aligned.
        nbytes: length of each, `[n]`.
        stop: one past the last, rounded up likewise.
    """

    start: Ints
    nbytes: Ints
    stop: int


def lay_out_rows(nbytes: Ints) -> RowLayout:
    """Put rows of these lengths one after the other. Pure."""
    padded = -(-nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    ends = np.cumsum(padded)
    return RowLayout(ends - padded, nbytes, int(ends[-1]) if len(ends) else 0)


def _available_bytes() -> float:
    """Return how much memory can be had without taking it from others; infinity where nobody says."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return float("inf")


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("megackpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux: a file without a name
        return os.dup(file.fileno())
