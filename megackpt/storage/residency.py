"""What of a file is in memory already.

Owns the questions that decide whether direct I/O pays: bytes in the page cache are copied from there, others
come quicker around it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

import numpy as np

_CACHESTAT = 451  # the number of the system call on every architecture but Alpha
_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)  # tmpfs, ramfs, hugetlbfs
_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Pages(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    ]


def is_in_memory(descriptor: int) -> bool:
    """Tell whether an open file is on a file system without a disk; False where the system does not say.

    Some of them take O_DIRECT, and make a copy all the same.

    Source: fstatfs(2).
    """
    if _libc is None or sys.platform != "linux":
        return False
    state = (ctypes.c_long * 64)()  # struct statfs, which begins with the type and is much shorter
    return not _libc.fstatfs(descriptor, ctypes.byref(state)) and state[0] in _IN_MEMORY


def is_cached(descriptor: int, offset_bytes: int, nbytes: int) -> bool:
    """Tell whether at least half of a range of an open file is in the page cache.

    True where the system does not say. The range may reach beyond the file's end.

    Source: cachestat(2), since Linux 6.5; mincore(2), which takes 70 times as long.
    """
    global _has_cachestat
    if _libc is None or sys.platform != "linux" or nbytes <= 0:
        return True
    if _has_cachestat:
        pages = _Pages()
        where = _Range(offset_bytes, nbytes)
        if not _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(pages), 0):
            return bool(2 * pages.cached * mmap.PAGESIZE >= nbytes)
        if ctypes.get_errno() != errno.ENOSYS:  # a file of a kind that it does not know
            return True
        _has_cachestat = False
    return _is_mapped_in(descriptor, offset_bytes, nbytes)


_has_cachestat = True


def is_sampled_cached(descriptor: int) -> bool:
    """Tell whether an open file seems to be in the page cache as a whole, by a look at some places."""
    nbytes = os.fstat(descriptor).st_size
    places = range(0, nbytes, max(nbytes // _SAMPLES, _SAMPLE_BYTES))
    return all(is_cached(descriptor, at, min(_SAMPLE_BYTES, nbytes - at)) for at in places)


def _is_mapped_in(descriptor: int, offset_bytes: int, nbytes: int) -> bool:
    assert _libc is not None
    first = offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = offset_bytes + nbytes - first
    try:
        with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=first) as mapped:
            pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            address, into = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
            failed = _libc.mincore(address, ctypes.c_size_t(length), into)
            del view  # or the map could not be closed
    except (OSError, ValueError):  # no file that can be mapped, or a range that it does not have
        return True
    return bool(failed) or bool(2 * int((pages & 1).sum()) >= len(pages))
