"""Opens files beneath one directory, and never anything else.

Owns the way from a name to a descriptor: a checkpoint directory may come from anywhere, so every part of a
name is opened relative to its parent, never through a symbolic link, and only regular files are read. What is
read or written is up to `local`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from megackpt.errors import StorageError
from megackpt.storage.store import check_name, is_allowed_name

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe must not wait for somebody to write to it.
_OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Sandbox:
    """The files beneath `root`, an absolute path.

    Refusals arrive as the system's OSError; what is no regular file or lies behind a link as StorageError.

    on_change is told the directory (relative to root, "" for root itself) whose entries are about to change.
    """

    def __init__(self, root: str, *, on_change: Callable[[str], None]) -> None:
        self.root = root
        self._on_change = on_change

    def path(self, name: str) -> str:
        """Return the path of `name`, for messages."""
        return f"{self.root}/{name}" if name else self.root

    def open_to_read(self, name: str) -> int:
        """Return a new descriptor of a regular file."""
        with self._directory_of(name) as (directory, leaf):
            descriptor = self._open_without_links(directory, leaf, _OPEN_TO_READ, name)
            try:
                self.require_regular(name, os.fstat(descriptor).st_mode)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def create(self, name: str) -> int:
        """Return a descriptor to write a new file, made with its parents instead of one of that name."""
        with self._directory_of(name, make=True) as (directory, leaf):
            self._on_change(_parent(name))
            # A new file, not the old one truncated: whoever reads the old one keeps reading the old bytes.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leaf, dir_fd=directory)
            return os.open(leaf, _CREATE, 0o666, dir_fd=directory)

    def rename(self, name: str, target: str) -> None:
        """Give `name` the name `target` in the same directory, at once and instead of what was there."""
        with self._directory_of(target) as (directory, leaf):
            self._on_change(_parent(target))
            os.rename(name.rpartition("/")[2], leaf, src_dir_fd=directory, dst_dir_fd=directory)

    def move(self, name: str, target: str) -> None:
        """Give `name` the name `target`, in whichever directory, instead of what was there."""
        with (
            self._directory_of(name) as (source, old),
            self._directory_of(target, make=True) as (parent, new),
        ):
            self._on_change(_parent(name))
            self._on_change(_parent(target))
            os.rename(old, new, src_dir_fd=source, dst_dir_fd=parent)

    def prune(self, prefix: str) -> None:
        """Remove directories below root that begin with `prefix` and hold nothing but empty directories."""
        with contextlib.suppress(FileNotFoundError), self._descend([]) as root:
            for leaf in _directories_in(root):
                if leaf.startswith(prefix):
                    self._on_change("")
                    self._prune(root, leaf)

    def _prune(self, parent: int, leaf: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            directory = os.open(leaf, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            try:
                for below in _directories_in(directory):
                    self._prune(directory, below)
            finally:
                os.close(directory)
            try:
                os.rmdir(leaf, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def unlink(self, name: str) -> None:
        """Remove a file; a symbolic link is removed itself. Missing is fine."""
        with contextlib.suppress(FileNotFoundError), self._directory_of(name) as (directory, leaf):
            self._on_change(_parent(name))
            os.unlink(leaf, dir_fd=directory)

    def state(self, name: str) -> os.stat_result | None:
        """Return what the system knows of `name` itself, a link not followed; None if there is nothing."""
        with contextlib.suppress(FileNotFoundError), self._directory_of(name) as (directory, leaf):
            return os.stat(leaf, dir_fd=directory, follow_symlinks=False)
        return None

    def flush_directory(self, name: str) -> None:
        """Make the entries of a directory ("" is root) durable; one that is gone needs nothing."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._descend(name.split("/") if name else []) as directory,
        ):
            flush_directory(directory)

    def names(self, prefix: str) -> list[str]:
        """Return the names of all regular files that begin with `prefix`, in no particular order."""
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError), self._descend([]) as root:
            self._collect(root, "", prefix, found)
        return found

    def require_regular(self, name: str, mode: int) -> None:
        """Refuse anything but a regular file.

        Raises:
            StorageError: `mode` (st_mode) is of something else.
        """
        if not stat.S_ISREG(mode):
            raise StorageError(
                f"{self.path(name)}: it is {_kind(mode)}, not a regular file. A checkpoint holds its own "
                "files, so that reading it can reach nothing else: put the real file there.",
                path=self.path(name),
            )

    @contextlib.contextmanager
    def _directory_of(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory that holds `name`, and the last part of the name."""
        check_name(name, location=self.root)
        *parents, leaf = name.split("/")
        with self._descend(parents, make=make) as directory:
            yield directory, leaf

    @contextlib.contextmanager
    def _descend(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of a directory; each one on the way is opened relative to the one before.

        So nobody can swap a part of the path for a link between a check and its use.
        """
        directory = os.open(self.root, _OPEN_DIRECTORY)
        try:
            for depth, part in enumerate(parts):
                if make:
                    self._make(directory, part, "/".join(parts[:depth]))
                name = "/".join(parts[: depth + 1])
                below = self._open_without_links(directory, part, _OPEN_DIRECTORY | os.O_NOFOLLOW, name)
                # The name moves on first: Ctrl-C after the close must not close the number a second time, as
                # it may be that of another thread's file by then.
                above, directory = directory, below
                os.close(above)
            yield directory
        finally:
            os.close(directory)

    def _make(self, directory: int, part: str, parent: str) -> None:
        try:
            os.mkdir(part, dir_fd=directory)
        except FileExistsError:
            return
        self._on_change(parent)

    def _open_without_links(self, directory: int, part: str, flags: int, name: str) -> int:
        try:
            return os.open(part, flags, dir_fd=directory)
        except OSError as error:
            # A link is ELOOP to O_NOFOLLOW and ENOTDIR to O_DIRECTORY; say that it is one.
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                mode = os.stat(part, dir_fd=directory, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    self.require_regular(name, mode)
            raise

    def _collect(self, directory: int, above: str, prefix: str, found: list[str]) -> None:
        with os.scandir(directory) as entries:
            listed = [
                (e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries
            ]
        for leaf, is_directory, is_file in listed:
            name = above + leaf
            if is_directory and (name + "/").startswith(prefix[: len(name) + 1]):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    below = os.open(leaf, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                    try:
                        self._collect(below, name + "/", prefix, found)
                    finally:
                        os.close(below)
            elif is_file and name.startswith(prefix) and is_allowed_name(name):
                found.append(name)


def flush_directory(descriptor: int) -> None:
    """Make the entries of an open directory durable, where the file system knows such a thing."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems: no fsync of directories
            raise


def _directories_in(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [e.name for e in entries if e.is_dir(follow_symlinks=False)]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((kind for test, kind in kinds if test(mode)), "a device")
