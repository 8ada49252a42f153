"""A store in memory, for tests and for simulated worlds whose ranks share one store.

It rejects the same calls as `LocalStore`. So code that works with this store also works with a directory.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from megackpt.errors import StorageError
from megackpt.storage.error_translation import large_file_error, short_file_error, storage_error
from megackpt.storage.store import SizedWriter, Store, check_name


class MemoryStore(Store):
    """Files in a dictionary. Safe for many threads.

    A streamed file becomes visible when its writer is closed.

    Args:
        location: the name of the store in messages.
        files: content of the store at the beginning, by name.
    """

    moves_atomically = True

    def __init__(self, location: str = "memory:", *, files: Mapping[str, bytes] | None = None) -> None:
        self._location = location
        self._files: dict[str, bytes] = dict(files or {})
        # How many files are in each directory, at any depth.
        self._files_in = Counter(directory for name in self._files for directory in _directories_of(name))
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        """The name given to this store."""
        return self._location

    def create(self) -> None:
        """Do nothing: it exists."""

    def open_writer(self, name: str, nbytes: int) -> MemoryWriter:
        """Start a new file of exactly `nbytes` bytes."""
        if nbytes < 0:
            raise ValueError(f"{self._path(name)}: nbytes is {nbytes}; a file has at least 0 bytes.")
        with self._lock:
            self._check_path(name)
            self._remove(name)
        return MemoryWriter(self, name, nbytes)

    def write(self, name: str, data: bytes) -> None:
        """Store a copy of `data`."""
        with self._lock:
            self._check_path(name)
            self._put(name, bytes(data))

    def replace(self, name: str, data: bytes) -> None:
        """Store a copy of `data`."""
        self.write(name, data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole file."""
        data = self._content(name, action="open")
        if len(data) > max_bytes:
            raise large_file_error(self._path(name), len(data), max_bytes)
        return data

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on."""
        if offset_bytes < 0:
            raise ValueError(f"{self._path(name)}: offset_bytes is {offset_bytes}; it cannot be negative.")
        data = self._content(name, action="open")
        stop = offset_bytes + out.nbytes
        if out.nbytes and stop > len(data):
            raise short_file_error(self._path(name), len(data), offset_bytes, out.nbytes)
        if out.nbytes:
            out.cast("B")[:] = memoryview(data)[offset_bytes:stop]

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return len(self._content(name, action="look up"))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        check_name(name, location=self._location)
        with self._lock:
            return name in self._files

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        with self._lock:
            return sorted(name for name in self._files if name.startswith(prefix))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            check_name(name, location=self._location)
            with self._lock:
                self._remove(name)

    def move(self, name: str, target: str) -> None:
        """Rename a file."""
        data = self._content(name, action="move")
        with self._lock:
            self._check_path(target)
            self._remove(name)  # before the next line, so that a move to the same name keeps the file
            self._put(target, data)

    def sync(self) -> None:
        """Do nothing: nothing is durable here."""

    def close(self) -> None:
        """Do nothing; the content stays, as in a directory."""

    def _content(self, name: str, *, action: str) -> bytes:
        check_name(name, location=self._location)
        with self._lock:
            data = self._files.get(name)
        if data is None:
            raise self._error(errno.ENOENT, action, name)
        return data

    def _put(self, name: str, data: bytes) -> None:
        if name not in self._files:
            self._files_in.update(_directories_of(name))
        self._files[name] = data

    def _remove(self, name: str) -> None:
        if self._files.pop(name, None) is not None:
            self._files_in.subtract(_directories_of(name))

    def _check_path(self, name: str) -> None:
        """Reject a name that would be both a file and a directory."""
        check_name(name, location=self._location)
        if any(directory in self._files for directory in _directories_of(name)):
            raise self._error(errno.ENOTDIR, "create", name)
        if self._files_in[name]:
            raise self._error(errno.EISDIR, "create", name)

    def _error(self, code: int, action: str, name: str) -> StorageError:
        return storage_error(OSError(code, os.strerror(code)), action=action, path=self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._location}/{name}"


def _directories_of(name: str) -> list[str]:
    """Return the directories on the path of a file, the outermost first."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


class MemoryWriter(SizedWriter):
    """A `StreamWriter` into a MemoryStore."""

    def __init__(self, store: MemoryStore, name: str, nbytes: int) -> None:
        super().__init__(f"{store.location}/{name}", nbytes)
        self._store = store
        self._name = name
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""
        nbytes = memoryview(data).nbytes
        self._check_room(nbytes)
        if nbytes:
            self._data += memoryview(data).cast("B")
        self._written += nbytes

    def _complete(self) -> None:
        self._open = False
        self._store.write(self._name, bytes(self._data))

    def _abandon(self) -> None:
        self._open = False
