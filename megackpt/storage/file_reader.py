"""Reads ranges of local files, through the page cache or around it.

Owns which of the two a range is read by. Bytes that are cached are copied from there; others are read with
O_DIRECT into aligned buffers, which several threads do faster than the system reads ahead, and which leaves
the memory of the host alone. Which file it is, and how it is opened safely, is up to `local`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from megackpt.storage.buffers import COMMON_POOL, ByteArray
from megackpt.storage.descriptors import DescriptorCache
from megackpt.storage.error_translation import ends_early, translated_errors
from megackpt.storage.lending import MAX_BORROWED_BYTES, check_lendable
from megackpt.storage.rawio import ALIGNMENT, enable_direct, read_some
from megackpt.storage.residency import is_cached, is_in_memory, is_sampled_cached

DIRECT_FROM_BYTES = 64 << 10
"""Shorter reads go through the page cache: what lies around them is likely to be read next."""

# A copy out of the page cache in pieces of this size is still in a processor's own cache when it is checked.
_CACHED_PIECE_BYTES = 1 << 20


class FileReader:
    """Fills memory with ranges of files. Safe for many threads.

    open_file opens a name for reading, and path says what to call it. Of each kind, with and without the page
    cache, at most open_files unused descriptors are kept.
    """

    def __init__(
        self,
        open_file: Callable[[str], int],
        path: Callable[[str], str],
        *,
        direct: bool,
        open_files: int,
    ) -> None:
        def open_around(name: str) -> int:
            descriptor = open_file(name)
            enable_direct(descriptor)  # where there is none, bytes come through the page cache as well
            return descriptor

        self._cached = DescriptorCache(open_file, limit=open_files)
        self._around = DescriptorCache(open_around, limit=open_files)
        self._path = path
        self._direct = direct
        self._has_disk: bool | None = None  # as the first file has; all are in one file system

    def is_cached(self, name: str) -> bool:
        """Tell whether a file seems to be in memory as a whole, so that no read has to wait.

        Raises:
            StorageError: the system refused.
        """
        with self._cached.borrow(name) as descriptor:
            return not self._may_wait(descriptor) or is_sampled_cached(descriptor)

    def fill(self, name: str, offset: int, out: memoryview) -> Iterator[int]:
        """Fill out, flat bytes, with those from offset on; yield now and then how many are there.

        Raises:
            FormatError: the file ends before.
            StorageError: the system refused.
        """
        with self._cached.borrow(name) as descriptor:
            if not self._goes_around(descriptor, offset, len(out)):
                yield from filled_cached(descriptor, self._path(name), offset, out)
                return
        target = np.frombuffer(out, np.uint8)
        for start in range(0, len(out), MAX_BORROWED_BYTES):
            piece = target[start : start + MAX_BORROWED_BYTES]
            with COMMON_POOL.lend() as buffer:
                np.copyto(piece, self._read_around(name, offset + start, len(piece), buffer))
            yield start + len(piece)

    @contextlib.contextmanager
    def lend(self, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield nbytes bytes from offset on, at most LENT_BYTES, valid until the end of the block.

        Raises:
            FormatError: the file ends before.
            StorageError: the system refused.
        """
        check_lendable(self._path(name), offset, nbytes)
        with COMMON_POOL.lend() as buffer:
            with self._cached.borrow(name) as descriptor:
                around = self._goes_around(descriptor, offset, nbytes)
                if not around:
                    fill_cached(descriptor, self._path(name), offset, buffer.data[:nbytes])
            yield self._read_around(name, offset, nbytes, buffer).data if around else buffer.data[:nbytes]

    def drop(self, name: str) -> None:
        """Forget a file that was replaced or deleted."""
        self._cached.drop(name)
        self._around.drop(name)

    def clear(self) -> None:
        """Forget all files."""
        self._cached.clear()
        self._around.clear()

    def _goes_around(self, descriptor: int, offset: int, nbytes: int) -> bool:
        if not self._direct or nbytes < DIRECT_FROM_BYTES or not self._may_wait(descriptor):
            return False
        return not is_cached(descriptor, offset, nbytes)

    def _may_wait(self, descriptor: int) -> bool:
        if self._has_disk is None:
            self._has_disk = not is_in_memory(descriptor)
        return self._has_disk

    def _read_around(self, name: str, offset: int, nbytes: int, buffer: ByteArray) -> ByteArray:
        """Return the bytes, somewhere in buffer."""
        low = offset // ALIGNMENT * ALIGNMENT
        wanted = -(-(offset + nbytes - low) // ALIGNMENT) * ALIGNMENT
        done = 0
        with self._around.borrow(name) as descriptor:
            while True:
                with translated_errors("read", self._path(name)):
                    count = read_some(descriptor, buffer.data[done:wanted], low + done)
                if low + done + count >= offset + nbytes:
                    break
                if not count:
                    raise ends_early(self._path(name), low + done, offset, nbytes)
                # Go on where direct I/O may, unless that is no progress: then `read_some` finds another way.
                done += count // ALIGNMENT * ALIGNMENT or count
        return buffer[offset - low : offset - low + nbytes]


def fill_cached(descriptor: int, path: str, offset: int, out: memoryview) -> None:
    """Fill out, flat bytes, with those from offset on, through the page cache; path is for messages.

    Raises:
        FormatError: the file ends before.
        StorageError: the system refused.
    """
    for _ in filled_cached(descriptor, path, offset, out):
        pass


def filled_cached(descriptor: int, path: str, offset: int, out: memoryview) -> Iterator[int]:
    """Like `fill_cached`; yield after each piece how many bytes are there."""
    done = 0
    while done < len(out):
        with translated_errors("read", path):
            count = read_some(descriptor, out[done : done + _CACHED_PIECE_BYTES], offset + done)
        if not count:
            raise ends_early(path, offset + done, offset, len(out))
        done += count
        yield done
