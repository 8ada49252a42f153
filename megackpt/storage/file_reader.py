"""Reads ranges of local files, through the page cache or with O_DIRECT.

Bytes in the page cache are copied from there. Others are read with O_DIRECT into aligned buffers. With
several threads this is faster than the read-ahead of the system, and it removes nothing from the page
cache. `local` opens the files.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megackpt.storage.error_translation import short_file_error, translated_errors
from megackpt.storage.rawio import (
    ALIGNMENT,
    COMMON_POOL,
    MAX_BORROWED_BYTES,
    ByteArray,
    enable_direct,
    is_cached,
    is_in_memory,
    is_sampled_cached,
    read_some,
)
from megackpt.storage.store import check_borrowed_range

DIRECT_FROM_BYTES = 64 << 10
"""Shorter reads go through the page cache: the next read is likely to need the bytes around them."""

# A part of this size, copied out of the page cache, is still in the processor's own cache when it is checked.
_CACHED_PART_BYTES = 1 << 20


class FileReader:
    """Reads ranges of files into memory. Safe for many threads.

    Args:
        open_file: opens a name for reading and returns the descriptor.
        path: returns the name of a file in messages.
        direct: whether bytes that are not in the page cache are read past it.
        open_files: unused descriptors to keep at most, of each kind: with and without O_DIRECT.
    """

    def __init__(
        self,
        open_file: Callable[[str], int],
        path: Callable[[str], str],
        *,
        direct: bool,
        open_files: int,
    ) -> None:
        def open_direct(name: str) -> int:
            descriptor = open_file(name)
            enable_direct(descriptor)  # if this fails, reads go through the page cache
            return descriptor

        self._cached_files = DescriptorCache(open_file, limit=open_files)
        self._direct_files = DescriptorCache(open_direct, limit=open_files)
        self._path = path
        self._direct = direct
        self._has_disk: bool | None = None  # known from the first file on: all are in one file system

    def is_cached(self, name: str) -> bool:
        """Return whether a file seems to be in memory, so that no read has to wait.

        Raises:
            StorageError: the file cannot be opened.
        """
        with self._cached_files.borrow(name) as descriptor:
            return not self._may_wait(descriptor) or is_sampled_cached(descriptor)

    def stream_into(self, name: str, offset: int, out: memoryview) -> Iterator[int]:
        """Fill out, flat bytes, from offset on; after each part, yield how many bytes are filled.

        Raises:
            FormatError: the file ends before `out` is full.
            StorageError: the file cannot be read.
        """
        with self._cached_files.borrow(name) as descriptor:
            if not self._is_direct(descriptor, offset, len(out)):
                yield from read_through_cache(descriptor, self._path(name), offset, out)
                return
        target = np.frombuffer(out, np.uint8)
        for start in range(0, len(out), MAX_BORROWED_BYTES):
            part = target[start : start + MAX_BORROWED_BYTES]
            with COMMON_POOL.borrow() as buffer:
                np.copyto(part, self._read_direct(name, offset + start, len(part), buffer))
            yield start + len(part)

    @contextlib.contextmanager
    def borrow(self, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield nbytes bytes from offset on, at most MAX_BORROWED_BYTES, valid until the end of the block.

        Raises:
            FormatError: the file ends before the range does.
            StorageError: the file cannot be read.
        """
        check_borrowed_range(self._path(name), offset, nbytes)
        with COMMON_POOL.borrow() as buffer:
            # The block ends before the yield: a slow caller must not keep the file open.
            with self._cached_files.borrow(name) as descriptor:
                is_direct = self._is_direct(descriptor, offset, nbytes)
                if not is_direct:
                    for _ in read_through_cache(descriptor, self._path(name), offset, buffer.data[:nbytes]):
                        pass
            yield self._read_direct(name, offset, nbytes, buffer).data if is_direct else buffer.data[:nbytes]

    def forget(self, name: str) -> None:
        """Close the descriptors of a file that was replaced or deleted."""
        self._cached_files.forget(name)
        self._direct_files.forget(name)

    def close(self) -> None:
        """Close the descriptors of all files; the next read opens its file again."""
        self._cached_files.clear()
        self._direct_files.clear()

    def _is_direct(self, descriptor: int, offset: int, nbytes: int) -> bool:
        if not self._direct or nbytes < DIRECT_FROM_BYTES or not self._may_wait(descriptor):
            return False
        return not is_cached(descriptor, offset, nbytes)

    def _may_wait(self, descriptor: int) -> bool:
        if self._has_disk is None:
            self._has_disk = not is_in_memory(descriptor)
        return self._has_disk

    def _read_direct(self, name: str, offset: int, nbytes: int, buffer: ByteArray) -> ByteArray:
        """Read a range past the page cache; return the part of buffer where it is."""
        # Direct I/O reads aligned ranges: one that encloses the wanted range.
        low = offset // ALIGNMENT * ALIGNMENT
        aligned_nbytes = -(-(offset + nbytes - low) // ALIGNMENT) * ALIGNMENT
        done = 0
        with self._direct_files.borrow(name) as descriptor:
            while True:
                with translated_errors("read", self._path(name)):
                    count = read_some(descriptor, buffer.data[done:aligned_nbytes], low + done)
                # The last read may end before aligned_nbytes: at the end of the file.
                if low + done + count >= offset + nbytes:
                    break
                if not count:
                    raise short_file_error(self._path(name), low + done, offset, nbytes)
                # Go on at an aligned offset, unless that is no progress: then `read_some` turns O_DIRECT off.
                done += count // ALIGNMENT * ALIGNMENT or count
        return buffer[offset - low : offset - low + nbytes]


def read_through_cache(descriptor: int, path: str, offset: int, out: memoryview) -> Iterator[int]:
    """Fill out, flat bytes, through the page cache; after each part, yield how many bytes are filled.

    Args:
        descriptor: a file open for reading.
        path: the name of the file in messages.
        offset: position of the first byte.
        out: the memory to fill.

    Raises:
        FormatError: the file ends before `out` is full.
        StorageError: the file cannot be read.
    """
    done = 0
    while done < len(out):
        with translated_errors("read", path):
            count = read_some(descriptor, out[done : done + _CACHED_PART_BYTES], offset + done)
        if not count:
            raise short_file_error(path, offset + done, offset, len(out))
        done += count
        yield done


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    readers: int = 0
    is_forgotten: bool = False  # no longer in the cache; the last reader closes it


class DescriptorCache:
    """Keeps at most `limit` unused descriptors open, by name. Safe for many threads.

    A descriptor is closed when it is the least recently used one of too many, or when its file changes. It is
    never closed while a thread reads from it.

    Args:
        open_file: opens a name for reading and returns the descriptor, which then belongs to the cache.
        limit: descriptors to keep.
    """

    def __init__(self, open_file: Callable[[str], int], *, limit: int) -> None:
        self._open_file = open_file
        self._limit = limit
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()  # least recently used first
        self._changes = 0  # how often a file was forgotten
        # Reentrant: the garbage collector may close a generator that reads, while this thread is in `_take`.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[int]:
        """Yield a descriptor that stays open at least until the end of the block."""
        file = self._take(name)
        try:
            yield file.descriptor
        finally:
            self._give_back(file)

    def forget(self, name: str) -> None:
        """Close a file that was replaced or deleted: the next reader opens it again."""
        with self._lock:
            self._changes += 1
            file = self._open.pop(name, None)
            if file is not None:
                _close_when_unused(file)

    def clear(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                _close_when_unused(self._open.popitem()[1])

    def _take(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._open.get(name)
            if file is not None:
                self._open.move_to_end(name)
                file.readers += 1
                return file
            changes = self._changes
        # Without the lock: on a network file system this may take long, and others read other files.
        file = _OpenFile(self._open_file(name), readers=1)
        with self._lock:
            if name in self._open or changes != self._changes:
                # Another thread has opened it, or this may be the old file of a name that was replaced.
                file.is_forgotten = True
                return file
            self._open[name] = file
            while len(self._open) > self._limit:
                _close_when_unused(self._open.popitem(last=False)[1])
        return file

    def _give_back(self, file: _OpenFile) -> None:
        with self._lock:
            file.readers -= 1
            if file.is_forgotten:
                _close_when_unused(file)


def _close_when_unused(file: _OpenFile) -> None:
    """Close the descriptor now, or let the last of its readers close it."""
    file.is_forgotten = True
    if not file.readers:
        os.close(file.descriptor)
