"""A store in a directory of a local or mounted file system.

Owns what makes files and their names durable, and which operations follow each other. How names become
descriptors without ever leaving the directory is in `beneath`, how a stream is written in `writer`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from megackpt.storage.buffers import COMMON_POOL, BufferPool
from megackpt.storage.error_translation import too_large, translated_errors
from megackpt.storage.file_reader import FileReader, fill_cached
from megackpt.storage.file_writer import FileWriter
from megackpt.storage.names import temporary_name
from megackpt.storage.paths import absolute_path
from megackpt.storage.rawio import write_fully
from megackpt.storage.sandbox import Sandbox, flush_directory
from megackpt.storage.sinks import FileOptions
from megackpt.storage.store import check_name

_OWN_BUFFERS = 8  # that a store keeps if its buffers are not of the common size


class LocalStore:
    """Files below one directory. A `Store`; see there for what each method does.

    root is the directory; it may be reached through symbolic links, nothing below it may. files says how
    files are written and read, open_files how many stay open between reads.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        files: FileOptions | None = None,
        open_files: int = 64,
    ) -> None:
        self._root = absolute_path(root)  # the process may change its directory later
        self._files = Sandbox(self._root, on_change=self._note_change)
        self._options = files or FileOptions()
        self._open_files = open_files
        common = self._options.buffer_bytes == COMMON_POOL.buffer_bytes
        self._pool = COMMON_POOL if common else BufferPool(self._options.buffer_bytes, limit=_OWN_BUFFERS)
        self._reading = FileReader(
            self._open_to_read,
            self._files.path,
            direct=self._options.direct,
            open_files=open_files,
        )
        self._unsynced: set[str] = set()  # directories below root ("" is root) whose entries changed
        self._unsynced_above: set[str] = set()  # paths of directories in which `create` made one
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of: the process that writes asynchronous saves opens files of its own."""
        return partial(type(self), files=self._options, open_files=self._open_files), (self._root,)

    @property
    def location(self) -> str:
        """The absolute path of the directory."""
        return self._root

    def create(self) -> None:
        """Make the directory and its missing parents; their names are durable after `sync` or `replace`."""
        with translated_errors("create the directory", self._root):
            missing = [self._root]
            while not os.path.lexists(parent := os.path.dirname(missing[-1])):
                missing.append(parent)
            for path in reversed(missing):
                try:
                    os.mkdir(path)
                except FileExistsError:  # of old, or another rank was faster
                    if not os.path.isdir(path):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                with self._lock:
                    self._unsynced_above.add(os.path.dirname(path))

    def open_writer(self, name: str, nbytes: int) -> FileWriter:
        """Start a new file of exactly `nbytes` bytes; room for it is reserved at once."""
        if nbytes < 0:
            raise ValueError(f"{self._files.path(name)}: nbytes is {nbytes}; a file has at least 0 bytes.")
        return FileWriter(
            self._create_file(name),
            nbytes,
            path=self._files.path(name),
            remove=lambda: self.delete([name]),
            options=self._options,
            pool=self._pool,
        )

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; its name is durable after `sync`."""
        self._write_small(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write beside the old file, then rename over it.

        A process that is killed may leave the new bytes under a name that begins with '.' and ends with
        '.tmp'.
        """
        check_name(name, location=self._root)
        temporary = temporary_name(name)
        self._write_small(temporary, data)
        try:
            with translated_errors("replace", self._files.path(name)):
                self._files.rename(temporary, name)
        except BaseException:
            self._try_to_delete(temporary)
            raise
        self._reading.drop(name)
        self._flush_above(name)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        descriptor = self._open_to_read(name)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > max_bytes:
                raise too_large(self._files.path(name), nbytes, max_bytes)
            try:
                data = bytearray(nbytes)
            except MemoryError:  # the file is a hole, or max_bytes somebody's claim
                raise too_large(self._files.path(name), nbytes, max_bytes) from None
            fill_cached(descriptor, self._files.path(name), 0, memoryview(data))
            return bytes(data)
        finally:
            os.close(descriptor)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on."""
        if offset_bytes < 0:
            raise ValueError(
                f"{self._files.path(name)}: offset_bytes is {offset_bytes}; it cannot be negative."
            )
        for _ in self.fill(name, offset_bytes, out.cast("B") if out.nbytes else memoryview(b"")):
            pass

    def fill(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
        """Fill `out`, flat bytes, from front to back, and yield how many are there; see `Fills`."""
        return self._reading.fill(name, offset_bytes, out)

    def lend(
        self, name: str, offset_bytes: int, nbytes: int
    ) -> contextlib.AbstractContextManager[memoryview]:
        """Yield a range of a file in memory of the store, valid until the end of the block; see `Lends`."""
        return self._reading.lend(name, offset_bytes, nbytes)

    def is_cached(self, name: str) -> bool:
        """Tell whether a file seems to be in memory as a whole, so that no read has to wait."""
        return self._reading.is_cached(name)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        path = self._files.path(name)
        with translated_errors("look up", path):
            state = self._files.state(name)
            if state is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._files.require_regular(name, state.st_mode)
            return state.st_size

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file; what could not be read (a symbolic link, say) is refused."""
        with translated_errors("look up", self._files.path(name)):
            state = self._files.state(name)
            if state is None:
                return False
            self._files.require_regular(name, state.st_mode)
            return True

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all regular files that begin with `prefix`, sorted.

        What this store would not open (symbolic links, pipes, odd names) is not listed.
        """
        with translated_errors("list", self._root):
            return sorted(self._files.names(prefix))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files. A symbolic link is removed itself, not what it points to."""
        for name in names:
            with translated_errors("delete", self._files.path(name)):
                self._files.unlink(name)
            self._reading.drop(name)

    def move(self, name: str, target: str) -> None:
        """Give a file another name, at once, instead of what was there. Durable after `sync`."""
        check_name(target, location=self._root)
        with translated_errors(f"move to {target!r}", self._files.path(name)):
            self._files.move(name, target)
        self._reading.drop(name)
        self._reading.drop(target)

    def prune(self, prefix: str = "") -> None:
        """Remove the directories at the top, of names that begin with `prefix`, that hold no files at all."""
        with translated_errors("remove empty directories below", self._root):
            self._files.prune(prefix)

    def sync(self) -> None:
        """Flush every directory in which this object made, replaced or removed something."""
        self._flush_directories(lambda directory: True)

    def close(self) -> None:
        """Close files kept open for reading."""
        self._reading.clear()

    def _open_to_read(self, name: str) -> int:
        with translated_errors("open", self._files.path(name)):
            return self._files.open_to_read(name)

    def _create_file(self, name: str) -> int:
        with translated_errors("create", self._files.path(name)):
            descriptor = self._files.create(name)
        self._reading.drop(name)
        return descriptor

    def _write_small(self, name: str, data: bytes) -> None:
        descriptor = self._create_file(name)
        try:
            with translated_errors("write", self._files.path(name), nbytes=len(data)):
                try:
                    write_fully(descriptor, memoryview(data), 0)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except BaseException:
            self._try_to_delete(name)
            raise

    def _try_to_delete(self, name: str) -> None:
        with contextlib.suppress(OSError):  # on the way out of a failure, which matters more
            self.delete([name])

    def _note_change(self, directory: str) -> None:
        with self._lock:
            self._unsynced.add(directory)

    def _flush_above(self, name: str) -> None:
        self._flush_directories(lambda directory: not directory or name.startswith(f"{directory}/"))

    def _flush_directories(self, chosen: Callable[[str], bool]) -> None:
        with self._lock:
            todo = sorted(filter(chosen, self._unsynced))
            # Forgotten before the flush: what changes meanwhile is noted anew.
            self._unsynced.difference_update(todo)
            above, self._unsynced_above = sorted(self._unsynced_above), set()
        try:
            for path in above:
                with translated_errors("flush", path):
                    _flush_path(path)
            for directory in todo:
                with translated_errors("flush", self._files.path(directory)):
                    self._files.flush_directory(directory)
        except BaseException:
            with self._lock:
                self._unsynced.update(todo)
                self._unsynced_above.update(above)
            raise


def _flush_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flush_directory(descriptor)
    finally:
        os.close(descriptor)
