"""Files as the system sees them: in memory, on disk, and how many of their bytes this process has read."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def drop(directory: Path) -> bool:
    """Take the files below a directory out of the page cache; False where that is not possible (tmpfs)."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    total = sum(path.stat().st_size for path in paths)
    return sum(_cached_bytes(path) for path in paths) <= total // 50


def warm(directory: Path, *, rank: int, ranks: int) -> None:
    """Read this rank's share of the files below a directory, so that they are in the page cache."""
    shard = bytearray(4 << 20)
    for path in sorted(path for path in directory.rglob("*") if path.is_file())[rank::ranks]:
        with path.open("rb", buffering=0) as file:
            while file.readinto(shard):
                pass


def read_bytes() -> int | None:
    """Return the bytes that this process has read from files so far, by any thread and any system call.

    Bytes from the page cache count; those read through a memory map or a socket do not. None where the system
    does not count (not Linux). Source: proc_pid_io(5).
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar:")), None)


def _cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache; all of them if the system does not say."""
    nbytes = path.stat().st_size
    if not nbytes:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-nbytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)  # ACCESS_COPY: a buffer of ctypes has to be writable
        try:
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), resident
            )
        finally:
            del first
    return nbytes if failed else sum(page & 1 for page in resident) * mmap.PAGESIZE
