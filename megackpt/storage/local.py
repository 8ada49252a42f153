"""A store in a directory of a local or mounted file system.

This module makes files and their names durable. `sandbox` opens files by name, none outside of the directory;
`file_writer` and `file_reader` write and read the bytes.

A file is durable after two steps: fsync of the file, which makes its bytes durable, and fsync of its
directory, which makes its name durable. The store notes the directories that it has changed, and `sync`
flushes them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from megackpt.storage.error_translation import large_file_error, translated_errors
from megackpt.storage.file_reader import FileReader, read_through_cache
from megackpt.storage.file_writer import FileWriter
from megackpt.storage.options import FileOptions
from megackpt.storage.rawio import COMMON_POOL, BufferPool, write_fully
from megackpt.storage.sandbox import Sandbox, flush_directory
from megackpt.storage.store import Store, check_name, temporary_name

_MAX_IDLE_BUFFERS = 8  # of a store whose buffers are not of the common size


class LocalStore(Store):
    """The files in one directory and its subdirectories.

    Args:
        root: the directory. Its own path may contain symbolic links; names in it may not, but for the links
            of a snapshot in the cache of huggingface_hub (`hub_cache`).
        files: how files are written and read.
        open_files: how many files stay open between reads.
    """

    moves_atomically = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        files: FileOptions | None = None,
        open_files: int = 64,
    ) -> None:
        self._root = absolute_path(root)  # the process may change its working directory later
        self._files = _sandbox_of(self._root, on_change=self._note_change)
        self._options = files or FileOptions()
        self._open_files = open_files
        self._pool = COMMON_POOL
        if self._options.buffer_bytes != COMMON_POOL.buffer_bytes:
            self._pool = BufferPool(self._options.buffer_bytes, limit=_MAX_IDLE_BUFFERS)
        self._reader = FileReader(
            self._open_to_read,
            self._files.path,
            direct=self._options.direct,
            open_files=open_files,
        )
        self._unsynced: set[str] = set()  # directories in root ("" is root) with changed entries
        self._unsynced_outside: set[str] = set()  # paths of the parents of directories that `create` made
        self._lock = threading.Lock()
        self._watches: tuple[dict[str, _Stamp], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: the process that writes asynchronous saves opens its own files."""
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
                except FileExistsError:  # it was there, or another rank was faster
                    if not os.path.isdir(path):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                # Also if another rank made it: that rank may die before it has flushed the parent.
                with self._lock:
                    self._unsynced_outside.add(os.path.dirname(path))

    def open_writer(self, name: str, nbytes: int) -> FileWriter:
        """Start a new file of exactly `nbytes` bytes, and reserve disk space for it."""
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
        """Write a temporary file in the same directory, then rename it over the old one.

        A process that is killed may leave the temporary file; see `store.is_temporary_name`.
        """
        check_name(name, location=self._root)
        # The bytes are durable before the rename: after a crash, the name must not be that of an empty file.
        temporary = temporary_name(name)
        self._write_small(temporary, data)
        try:
            with translated_errors("replace", self._files.path(name)):
                self._files.rename(temporary, name)
        except BaseException:
            self._try_to_delete(temporary)
            raise
        self._reader.forget(name)
        self._flush_parents(name)  # last: this makes the rename itself durable

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        descriptor = self._open_to_read(name)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > max_bytes:
                raise large_file_error(self._files.path(name), nbytes, max_bytes)
            try:
                data = bytearray(nbytes)
            except MemoryError:  # a sparse file, or max_bytes came from a file that is damaged
                raise large_file_error(self._files.path(name), nbytes, max_bytes) from None
            for _ in read_through_cache(descriptor, self._files.path(name), 0, memoryview(data)):
                pass
            return bytes(data)
        finally:
            os.close(descriptor)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on."""
        if offset_bytes < 0:
            raise ValueError(
                f"{self._files.path(name)}: offset_bytes is {offset_bytes}; it cannot be negative."
            )
        for _ in self.stream_into(name, offset_bytes, out.cast("B") if out.nbytes else memoryview(b"")):
            pass

    def stream_into(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
        """Fill `out`, flat bytes, from front to back; after each part, yield how many bytes are filled."""
        return self._reader.stream_into(name, offset_bytes, out)

    def borrow(
        self, name: str, offset_bytes: int, nbytes: int
    ) -> contextlib.AbstractContextManager[memoryview]:
        """Yield a range of a file in a buffer of the store, valid until the end of the block."""
        return self._reader.borrow(name, offset_bytes, nbytes)

    def is_cached(self, name: str) -> bool:
        """Return whether a file seems to be in the page cache, so that no read has to wait."""
        return self._reader.is_cached(name)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        path = self._files.path(name)
        with translated_errors("look up", path):
            state = self._files.stat(name)
            if state is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._files.require_regular(name, state.st_mode)
            return state.st_size

    def exists(self, name: str) -> bool:
        """Return whether there is such a file.

        Raises:
            StorageError: the name belongs to a symbolic link, a directory or something else that is no file.
        """
        with translated_errors("look up", self._files.path(name)):
            state = self._files.stat(name)
            if state is None:
                return False
            self._files.require_regular(name, state.st_mode)
            return True

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all regular files that begin with `prefix`, sorted.

        What this store does not open is left out: symbolic links, pipes, names that are not allowed.
        """
        with translated_errors("list", self._root):
            return sorted(self._files.names(prefix))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files. Of a symbolic link, the link is removed and not its target."""
        for name in names:
            with translated_errors("delete", self._files.path(name)):
                self._files.unlink(name)
            self._reader.forget(name)

    def move(self, name: str, target: str) -> None:
        """Rename a file, atomically."""
        check_name(target, location=self._root)
        with translated_errors(f"move to {target!r}", self._files.path(name)):
            self._files.move(name, target)
        self._reader.forget(name)
        self._reader.forget(target)

    def remove_empty_directories(self, prefix: str = "") -> None:
        """Remove the topmost directories that begin with `prefix` and contain no files at any depth."""
        with translated_errors("remove empty directories below", self._root):
            self._files.remove_empty_directories(prefix)

    def sync(self) -> None:
        """Flush every directory whose entries this object has changed."""
        with self._lock:
            directories = sorted(self._unsynced)
        self._flush_directories(directories)

    def close(self) -> None:
        """Close files kept open for reading."""
        self._reader.close()

    def watch(self) -> Callable[[], str | None]:
        """Note inode, size and time of each file at its next opening; see `Store.watch`."""
        stamps: dict[str, _Stamp] = {}
        self._reader.close()  # a file that stays open would not be noted
        with self._lock:
            self._watches = (*self._watches, stamps)

        def changed() -> str | None:
            with self._lock:
                noted = dict(stamps)
            return next((name for name, stamp in noted.items() if self._stamp_of(name) != stamp), None)

        return changed

    def _stamp_of(self, name: str) -> _Stamp | None:
        """Return the stamp of a file as it is now; None if it cannot be opened."""
        try:
            descriptor = self._files.open_to_read(name)
        except OSError:
            return None
        try:
            return _stamp(descriptor)
        finally:
            os.close(descriptor)

    def _open_to_read(self, name: str) -> int:
        with translated_errors("open", self._files.path(name)):
            descriptor = self._files.open_to_read(name)
        for stamps in self._watches:
            with self._lock:
                stamps.setdefault(name, _stamp(descriptor))
        return descriptor

    def _create_file(self, name: str) -> int:
        with translated_errors("create", self._files.path(name)):
            descriptor = self._files.create(name)
        self._reader.forget(name)
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
        with contextlib.suppress(OSError):  # the error that led here matters more
            self.delete([name])

    def _note_change(self, directory: str) -> None:
        with self._lock:
            self._unsynced.add(directory)

    def _flush_parents(self, name: str) -> None:
        """Flush those directories on the path of a file whose entries have changed."""
        with self._lock:
            parents = sorted(d for d in self._unsynced if not d or name.startswith(f"{d}/"))
        self._flush_directories(parents)

    def _flush_directories(self, directories: list[str]) -> None:
        with self._lock:
            # Before the flush: an entry that changes during the flush marks its directory again.
            self._unsynced.difference_update(directories)
            outside, self._unsynced_outside = sorted(self._unsynced_outside), set()
        try:
            for path in outside:
                with translated_errors("flush", path):
                    _flush_path(path)
            for directory in directories:
                with translated_errors("flush", self._files.path(directory)):
                    self._files.flush_directory(directory)
        except BaseException:
            # What was not flushed stays marked, so that a second `sync` flushes it.
            with self._lock:
                self._unsynced.update(directories)
                self._unsynced_outside.update(outside)
            raise


_Stamp: TypeAlias = tuple[int, int, int]
"""Inode, size and time of a file: they show whether it has changed."""


def _stamp(descriptor: int) -> _Stamp:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def expanded_path(path: str | os.PathLike[str]) -> str:
    """Return a path with `~` or `~user` at its beginning replaced by a home directory, as a shell does.

    A path whose user does not exist is returned unchanged.

    >>> expanded_path("/ckpt/~run"), expanded_path("./~")
    ('/ckpt/~run', './~')
    """
    return os.path.expanduser(os.fspath(path))


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an expanded path that stays valid when the process changes its directory."""
    return os.path.abspath(expanded_path(path))


def _flush_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flush_directory(descriptor)
    finally:
        os.close(descriptor)


def _sandbox_of(root: str, *, on_change: Callable[[str], None]) -> Sandbox:
    """Return the sandbox for a directory, which may be in the cache of huggingface_hub."""
    if "/models--" not in root:
        return Sandbox(root, on_change=on_change)
    from megackpt.storage.hub_cache import sandbox_of

    return sandbox_of(root, on_change=on_change)
