"""Single requests to the operating system about one open file; the standard library lacks some of them.

These are complete writes, reads, direct I/O (O_DIRECT, which bypasses the page cache), reservation of
space, and the question which bytes are in the page cache. `file_writer` and `file_reader` decide which one
to use.

This module also has the page-aligned buffers of these requests. They are kept for the life of the process:
the first touch of a fresh page costs several times as much as a copy into it, so new buffers for each save
would cost more than the digests of all its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

# The strictest common demand of direct I/O on offset, length and address; also the page size mmap aligns to.
ALIGNMENT = 4096
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Linux writes at most 2 GiB - 4 KiB in one request. After shorter requests, an interrupted program ends
# sooner.
_REQUEST_BYTES = 64 << 20

_CACHESTAT = 451  # the number of the system call on every architecture but Alpha
_FILE_SYSTEMS_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)  # tmpfs, ramfs, hugetlbfs
_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def write_fully(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` bytes, also if the system takes only a part of it at a time.

    The rest goes through the page cache if the file system rejects this kind of direct I/O, or if a short
    write leaves a rest that is not aligned.
    """
    is_rejected = False
    while data:
        try:
            count = os.pwrite(descriptor, data[:_REQUEST_BYTES], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or is_rejected:
                raise
            disable_direct(descriptor)
            is_rejected = True
            continue
        if not count:  # a system that neither writes nor fails would be asked for ever
            raise OSError(errno.EIO, "the system wrote no byte of a request, and gave no error")
        data = data[count:]
        offset += count


def read_some(descriptor: int, data: memoryview, offset: int) -> int:
    """Read into `data` in one request; return the number of bytes, 0 at the end of the file.

    If the file system rejects this kind of direct I/O, the request goes through the page cache.
    """
    try:
        return os.preadv(descriptor, [data], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        disable_direct(descriptor)
    return os.preadv(descriptor, [data], offset)


def enable_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on; return False where the system or file system does not have it."""
    if not _O_DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError:  # EINVAL: this file system does not have it
        return False
    return True


def disable_direct(descriptor: int) -> None:
    """Turn O_DIRECT off. Another thread that shares the descriptor may have done so already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)


def reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk space for `nbytes` bytes, so that a full disk is an error before anything is written.

    Does nothing where the file system cannot reserve.

    Raises:
        OSError: ENOSPC, EDQUOT or EFBIG.
    """
    state = os.fstatvfs(descriptor)
    # Compare first: a request for more than is free may take all free space from others until it fails.
    if state.f_blocks and nbytes > state.f_bfree * state.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not nbytes or _fallocate is None:
        return
    while _fallocate(descriptor, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return


# Not os.posix_fallocate: where the file system cannot reserve, the C library writes to every block of the
# file instead, which doubles the I/O.
_fallocate = getattr(_libc, "fallocate64", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class _CachestatRange(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _CachestatPages(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    ]


def is_in_memory(descriptor: int) -> bool:
    """Return whether an open file is on a file system without a disk; False where the system does not say.

    Some of these file systems accept O_DIRECT, which saves no copy there.

    Source: fstatfs(2).
    """
    if sys.platform != "linux":
        return False
    state = (ctypes.c_long * 64)()  # struct statfs, which begins with the type and is much shorter
    return not _libc.fstatfs(descriptor, ctypes.byref(state)) and state[0] in _FILE_SYSTEMS_IN_MEMORY


def is_cached(descriptor: int, offset_bytes: int, nbytes: int) -> bool:
    """Return whether at least half of a range of an open file is in the page cache.

    True where the system does not say. The range may reach beyond the file's end.

    Source: cachestat(2), since Linux 6.5; mincore(2), which takes 70 times as long.
    """
    global _has_cachestat
    if sys.platform != "linux" or nbytes <= 0:
        return True
    if _has_cachestat:
        pages = _CachestatPages()
        bounds = _CachestatRange(offset_bytes, nbytes)
        if not _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(bounds), ctypes.byref(pages), 0):
            return bool(2 * pages.cached * mmap.PAGESIZE >= nbytes)
        if ctypes.get_errno() != errno.ENOSYS:  # a kind of file that it does not know
            return True
        _has_cachestat = False
    return _is_in_core(descriptor, offset_bytes, nbytes)


_has_cachestat = True


def is_sampled_cached(descriptor: int) -> bool:
    """Return whether an open file seems to be in the page cache, judged by samples of it."""
    nbytes = os.fstat(descriptor).st_size
    offsets = range(0, nbytes, max(nbytes // _SAMPLES, _SAMPLE_BYTES))
    return all(is_cached(descriptor, at, min(_SAMPLE_BYTES, nbytes - at)) for at in offsets)


def _is_in_core(descriptor: int, offset_bytes: int, nbytes: int) -> bool:
    """Do the same as `is_cached` with mincore, for systems without cachestat."""
    first = offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = offset_bytes + nbytes - first
    try:
        with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=first) as mapped:
            pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            address, into = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
            failed = _libc.mincore(address, ctypes.c_size_t(length), into)
            del view  # or the map could not be closed
    except (OSError, ValueError):  # a file that cannot be mapped, or a range beyond its end
        return True
    return bool(failed) or bool(2 * int((pages & 1).sum()) >= len(pages))


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
        # Reentrant: the finalizer of a view gives its buffer back, and the garbage collector may call it
        # while this thread is in `take`.
        self._lock = threading.RLock()

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
        """Start empty in a forked process, where a thread that does not exist there may hold the lock."""
        self._lock = threading.RLock()
        self._idle = []


COMMON_POOL = BufferPool(BUFFER_BYTES, limit=_MAX_IDLE_BUFFERS)
"""The buffers of this process. It keeps at most 32 MiB; buffers beyond that are freed when they come back."""

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
