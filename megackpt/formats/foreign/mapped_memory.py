"""Reads tensors in mapped files by requests of the kernel.

To look at a page of a file that has been cut short ends the process (SIGBUS). The kernel, asked for the same
bytes through `/proc/self/mem`, returns an error. Systems without that file read the memory itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megackpt.errors import CheckpointError, IntegrityError, StorageError

_MEMORY = "/proc/self/mem"
_LONG_BYTES = 64 * 1024
_SPAN_BYTES = 16 * 1024 * 1024
"""Elements that lie apart are read with what lies between them, so many bytes at a time."""


class MappedFiles:
    """The files that this process has mapped now, to read long parts of them faster than through memory.

    It is right for the memory of tensors that live as long as it does.
    """

    def __init__(self) -> None:
        self._files: list[tuple[int, int, int, int, str]] = []  # start, stop, offset, inode, path
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    fields = line.rstrip("\n").split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith("/"):
                        start, stop = (int(text, 16) for text in fields[0].split("-"))
                        self._files.append((start, stop, int(fields[2], 16), int(fields[4]), fields[5]))
        except OSError:  # a system without such a file
            return

    def read(self, address: int, out: memoryview) -> None:
        """Fill out with bytes at an address, of a file or of other memory. Safe for many threads.

        Raises:
            OSError: the file has been cut short, or its disk fails.
        """
        number = bisect_right(self._files, (address, sys.maxsize)) - 1
        if len(out) < _LONG_BYTES or number < 0:
            return read_memory(address, out)
        start, stop, offset, inode, path = self._files[number]
        if address + len(out) > stop or not _is_file(path, inode):
            return read_memory(address, out)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_ino != inode:
                return read_memory(address, out)
            filled = 0
            while filled < len(out):
                count = os.preadv(descriptor, [out[filled:]], offset + address - start + filled)
                if count == 0:
                    raise OSError(errno.EIO, f"{path} ends before the bytes that are needed")
                filled += count
        finally:
            os.close(descriptor)


def _is_file(path: str, inode: int) -> bool:
    """Return whether a path is still that of a file; to open another thing may wait for ever."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == inode


def read_memory(address: int, out: memoryview) -> None:
    """Fill out with bytes of this process, which may be those of a mapped file. Safe for many threads.

    Raises:
        OSError: the file has been cut short, or its disk fails.
    """
    try:
        # Opened anew: in a forked process, a descriptor of its parent would read the parent's memory.
        descriptor = os.open(_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        ctypes.memmove((ctypes.c_char * len(out)).from_buffer(out), address, len(out))
        return
    try:
        filled = 0
        while filled < len(out):
            filled += os.preadv(descriptor, [out[filled:]], address + filled)
    finally:
        os.close(descriptor)


@contextmanager
def cut_files_are_errors(where: str) -> Iterator[None]:
    """Raise an error of ours where `read_memory`, or the system, raises an OSError; where names the files."""
    try:
        yield
    except CheckpointError:  # some are OSErrors, too
        raise
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EFAULT):
            text = f"{where}: cannot be read ({error}). Check the permissions, and the disk."
            raise StorageError(text, path=where) from error
        raise IntegrityError(
            f"{where}: a file was cut short while it was read, or its disk fails ({error}). Wait until "
            f"nothing writes there, and start again.",
            path=where,
        ) from error


def in_memory(tensor: Tensor) -> Tensor:
    """Return a copy of a strided tensor, contiguous and with its elements as they look.

    Raises:
        OSError: as `read_memory`.
    """
    stored = stored_elements(tensor)
    copy = torch.empty(stored.shape, dtype=stored.dtype)
    _fill(copy, stored)
    return as_it_looks(copy, tensor)


def stored_elements(tensor: Tensor) -> Tensor:
    """Return the elements in the memory of a tensor: those of a conjugate or a negative look otherwise."""
    tensor = tensor.detach()
    # The negative of a negative, and the conjugate of a conjugate, are views of the same memory.
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return tensor.conj() if tensor.is_conj() else tensor


def as_it_looks(elements: Tensor, tensor: Tensor) -> Tensor:
    """Return elements in the memory of a tensor as that tensor shows them."""
    if tensor.is_conj():
        elements = elements.conj().resolve_conj()
    return torch._neg_view(elements).resolve_neg() if tensor.is_neg() else elements


def elements_at(tensor: Tensor, first: int, count: int) -> Tensor:
    """Return some elements of a contiguous tensor in row-major order, as they look: `[count]`.

    Raises:
        OSError: as `read_memory`.
    """
    stored = stored_elements(tensor)
    copy = torch.empty(count, dtype=stored.dtype)
    if count:
        read_memory(stored.data_ptr() + first * stored.dtype.itemsize, _bytes_of(copy))
    return as_it_looks(copy, tensor)


def _fill(out: Tensor, stored: Tensor) -> None:
    """Copy a tensor in mapped memory, in parts that lie close together, into one in memory."""
    if stored.numel() == 0:
        return
    if stored.is_contiguous() and out.is_contiguous():
        read_memory(stored.data_ptr(), _bytes_of(out))
        return
    itemsize = stored.dtype.itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(stored.shape, stored.stride(), strict=True))
    longest = max(range(stored.dim()), key=lambda dim: (stored.shape[dim] > 1, stored.stride(dim)))
    if span * itemsize <= _SPAN_BYTES:
        between = torch.empty(span, dtype=stored.dtype)
        read_memory(stored.data_ptr(), _bytes_of(between))
        out.copy_(between.as_strided(stored.shape, stored.stride()))
        return
    # Along the dim whose elements lie farthest from each other, halves lie in different parts of memory.
    half = stored.shape[longest] // 2
    for start, length in ((0, half), (half, stored.shape[longest] - half)):
        _fill(out.narrow(longest, start, length), stored.narrow(longest, start, length))


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data
