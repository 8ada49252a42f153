"""The interface of a store of files and of a writer of one file, and the names that files may have.

`Store` is the base class of all stores. A store must define its abstract methods; the others have defaults.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from megackpt.errors import StorageError
from megackpt.storage.error_translation import closed_writer_error, excess_bytes_error, incomplete_file_error
from megackpt.storage.rawio import COMMON_POOL, MAX_BORROWED_BYTES

_COPY_BYTES = 4 << 20


class StreamWriter(Protocol):
    """Appends to one new file, whose size was given when it was opened. Used by one thread at a time.

    A context manager: leaving the block closes the writer; an exception in the block removes the partial
    file.
    """

    def write(self, data: memoryview) -> None:
        """Append `data`, a C-contiguous buffer of any element type. The caller may reuse it afterwards.

        Raises:
            StorageError: this write failed or, where writes go on in the background, an earlier one; or the
                file would be longer than the size it was opened with.
        """
        ...

    def close(self) -> None:
        """Make the content durable. A second call does nothing. If it fails, the partial file is removed.

        Raises:
            StorageError: a write failed, or the file is shorter than the size it was opened with.
        """
        ...

    def __enter__(self) -> StreamWriter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class SizedWriter(ABC):
    """Base class of writers. A writer ends once: with a file of the size it was opened with, or with no file.

    A subclass defines `write`, which calls `_check_room` first and adds what it wrote to `_written`.

    Attributes:
        _open: whether the file is still being written; `_complete` and `_abandon` set it to False.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._written = 0
        self._open = True

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""

    def close(self) -> None:
        """Make the content durable and visible. See StreamWriter."""
        if not self._open:
            return
        if self._written != self._nbytes:
            self._abandon()
            raise incomplete_file_error(self._path, written=self._written, expected=self._nbytes)
        self._complete()

    def __enter__(self) -> SizedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is None:
            self.close()
        elif self._open:
            self._abandon()

    def _check_room(self, nbytes: int) -> None:
        """Raise an error if the writer is closed, or if nbytes more would exceed the size of the file."""
        if not self._open:
            raise closed_writer_error(self._path)
        if self._written + nbytes > self._nbytes:
            raise excess_bytes_error(self._path, nbytes, written=self._written, expected=self._nbytes)

    @abstractmethod
    def _complete(self) -> None:
        """Finish the file, all of whose bytes were written. If that fails, remove it."""

    @abstractmethod
    def _abandon(self) -> None:
        """Stop writing and remove the partial file."""


_SHORT_BYTES = 32 << 10
_BUFFER_BYTES = 1 << 20


class BufferedWriter:
    """Collects short writes in a buffer, and passes all bytes to a writer in order.

    In a store, a write of a kilobyte takes about as long as a write of a few hundred kilobytes.
    """

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._buffer = bytearray()

    def write(self, data: memoryview) -> None:
        """Take the next bytes; their memory may be used again when this returns."""
        if len(data) > _SHORT_BYTES:
            self.flush()  # first, so that the order of the bytes stays
            self._writer.write(data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the content of the buffer to the store."""
        if self._buffer:
            self._writer.write(memoryview(self._buffer))
            self._buffer = bytearray()


class Store(ABC):
    """The files of one checkpoint, by relative names with parts joined by '/'. Safe for many threads.

    A store of your own defines the abstract methods. The others have defaults that call them; override one
    where your store can do better. `save` and `load` also accept an object that has the abstract methods and
    does not derive from this class; it gets the defaults.

    Every method is local: no rank waits for another. Every method raises StorageError if the operation fails,
    with the reason, the path and what to do; `errno` of the error is set where the system gave one.

    A file does not change after it was written, except by `replace`. So a store may keep files open between
    reads. It sees the changes that it makes itself.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """The name of this store in messages: a path or a URL."""
        ...

    @abstractmethod
    def create(self) -> None:
        """Make the store ready to be written to. One that exists already is left as it is.

        Durable after `sync` or `replace`.
        """
        ...

    @abstractmethod
    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file of exactly `nbytes` bytes; it takes the place of an older file of that name.

        The file may be visible before it is complete: use a name that nothing refers to yet. Its content is
        durable when the writer is closed, its name after `sync`.
        """
        ...

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file; its content is durable when this returns, its name after `sync`."""
        ...

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file atomically: readers find the old bytes or the new ones, also after a crash.

        Durable when it returns. This is how a checkpoint is committed.
        """
        ...

    @abstractmethod
    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file, as it is now.

        Raises:
            FormatError: the file is larger than `max_bytes`; nothing of it was read.
        """
        ...

    @abstractmethod
    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`, a writable C-contiguous buffer, with the bytes from `offset_bytes` on.

        Other Python threads can run meanwhile.

        Raises:
            FormatError: the file ends before `out` is full.
        """
        ...

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        ...

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files that begin with `prefix`, sorted; none before `create`."""
        ...

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are no error. Durable after `sync`."""
        ...

    @abstractmethod
    def sync(self) -> None:
        """Make the names of everything written and deleted through this object durable."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Close files and free buffers. Using the store again opens them again."""
        ...

    @property
    def moves_atomically(self) -> bool:
        """Whether `move` is one atomic step that copies nothing, as a rename is."""
        return False

    @property
    def replaces_on_close(self) -> bool:
        """Whether a file of `open_writer` takes the place of the older one atomically, when it is closed."""
        return False

    def borrow(self, name: str, offset_bytes: int, nbytes: int) -> AbstractContextManager[memoryview]:
        """Yield a range of a file in a buffer of the store, valid until the end of the block.

        For callers that only look at the bytes or copy them on: they need no buffer of their own.

        Args:
            name: the file.
            offset_bytes: position of the range in the file.
            nbytes: its length, at most MAX_BORROWED_BYTES.

        Raises:
            FormatError: the file ends before the range does.
        """
        return _borrow_from_pool(self, name, offset_bytes, nbytes)

    def stream_into(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
        """Fill `out`, flat bytes, from front to back; after each part, yield how many bytes are filled.

        So a caller can compute digests while the bytes are still in the processor's cache.

        Raises:
            FormatError: the file ends before `out` is full.
        """
        self.read_into(name, offset_bytes, out)
        yield len(out)

    def is_cached(self, name: str) -> bool:
        """Return whether a file seems to be in memory, so that reads need not wait; False if unknown."""
        return False

    def watch(self) -> Callable[[], str | None]:
        """Note the state of each file at its next opening; return a function that names one that has changed.

        The function returns None if no file has, or if the store cannot know, as by default.
        """
        return lambda: None

    def move(self, name: str, target: str) -> None:
        """Rename a file; it takes the place of an older file of the new name. Durable after `sync`.

        A move to the same name changes nothing. The default copies the file; see `moves_atomically`.
        """
        nbytes = self.size(name)
        if target == name:  # the copy would truncate the file that it reads, and then delete it
            return
        with self.open_writer(target, nbytes) as writer:
            for start in range(0, nbytes, _COPY_BYTES):
                part = bytearray(min(_COPY_BYTES, nbytes - start))
                self.read_into(name, start, memoryview(part))
                writer.write(memoryview(part))
        self.delete([name])  # after the block, which makes the copy durable

    def remove_empty_directories(self, prefix: str = "") -> None:  # noqa: B027 - many stores have none
        """Remove the topmost directories that begin with `prefix` and have no files; see `LocalStore`."""


def check_borrowed_range(path: str, offset_bytes: int, nbytes: int) -> None:
    """Reject a range that does not fit into one buffer: a slice of the buffer would silently be too short.

    Raises:
        ValueError: the range is longer than MAX_BORROWED_BYTES, or begins before the file.
    """
    if offset_bytes < 0 or not 0 <= nbytes <= MAX_BORROWED_BYTES:
        raise ValueError(
            f"{path}: {nbytes} bytes from {offset_bytes} on cannot be borrowed; ask for at most "
            f"{MAX_BORROWED_BYTES} from a position in the file, or read into memory of your own."
        )


@contextlib.contextmanager
def _borrow_from_pool(store: Store, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
    check_borrowed_range(f"{store.location}/{name}", offset_bytes, nbytes)
    with COMMON_POOL.borrow() as buffer:
        data = buffer.data[:nbytes]
        store.read_into(name, offset_bytes, data)
        yield data


def check_name(name: str, *, location: str) -> None:
    """Reject a name that could mean a file outside of the store, or that some systems cannot store.

    Raises:
        StorageError: `name` is empty, absolute, has an empty, '.' or '..' part, a backslash, a NUL or a
            character that UTF-8 cannot encode.

    >>> check_name("data/rank-00000.safetensors", location="/ckpt")
    """
    fault = _fault_of(name)
    if fault is not None:
        raise StorageError(
            f"{location}: the file name {name!r} {fault}, so it is not allowed. Names inside a checkpoint "
            "are relative, with parts joined by '/'. If it was read from a checkpoint, that checkpoint is "
            "damaged or forged.",
            path=location,
        )


def is_allowed_name(name: str) -> bool:
    """Return whether `check_name` accepts a name."""
    return _fault_of(name) is None


def _fault_of(name: str) -> str | None:
    if not name:
        return "is empty"
    if name.startswith("/"):
        return "is absolute"
    if "\0" in name:
        return "contains a NUL"
    if "\\" in name:
        return "contains a backslash"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
    return None


# A file that must change atomically is written under a temporary name in the same directory, then renamed. A
# crash leaves the temporary file; the next save recognises its name and deletes it. See docs/format.md.
_TEMPORARY_END = r"\.[0-9a-f]{16}\.tmp"
_TEMPORARY = re.compile(rf"\..+{_TEMPORARY_END}")


def temporary_name(name: str) -> str:
    """Return a new name for a temporary file in the directory of the file `name`."""
    head, slash, leaf = name.rpartition("/")
    return f"{head}{slash}.{leaf}.{secrets.token_hex(8)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Return whether a name was made by `temporary_name`, for any file."""
    return _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None


def is_temporary_name_of(name: str, file: str) -> bool:
    """Return whether a name was made by `temporary_name` for this file."""
    head, slash, leaf = file.rpartition("/")
    return re.fullmatch(re.escape(f"{head}{slash}.{leaf}") + _TEMPORARY_END, name) is not None
