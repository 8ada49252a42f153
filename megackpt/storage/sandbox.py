"""A sandbox for file names: opens regular files in one directory and its subdirectories, and nothing else.

A checkpoint may come from anywhere, and so may the file names in it. Each part of a name is opened relative
to its parent (openat), never through a symbolic link, and only regular files are read. `local` reads and
writes their bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from megackpt.errors import StorageError
from megackpt.storage.store import check_name, is_allowed_name

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe must not wait for somebody to write to it.
_OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Sandbox:
    """The files in a directory and its subdirectories.

    Methods raise the system's OSError, or a StorageError for a link or anything else that is no regular file.

    Args:
        root: the directory, an absolute path.
        on_change: called with a directory (relative to root, "" for root itself) before its entries change.
    """

    def __init__(self, root: str, *, on_change: Callable[[str], None]) -> None:
        self.root = root
        self._on_change = on_change

    def path(self, name: str) -> str:
        """Return the path of the file `name`, for messages."""
        return f"{self.root}/{name}" if name else self.root

    def open_to_read(self, name: str) -> int:
        """Open a regular file; return the descriptor."""
        with self._directory_of(name) as (directory, leaf):
            return self._open_regular(directory, leaf, name)

    def create(self, name: str) -> int:
        """Make a new file and its parent directories; return the descriptor. An older file is unlinked."""
        with self._directory_of(name, make=True) as (directory, leaf):
            self._on_change(_parent(name))
            # Unlink the old file, do not truncate it: readers that have it open still read the old bytes.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leaf, dir_fd=directory)
            return os.open(leaf, _CREATE, 0o666, dir_fd=directory)

    def rename(self, name: str, target: str) -> None:
        """Rename `name` to `target`, in the same directory; an older file `target` is replaced."""
        with self._directory_of(target) as (directory, leaf):
            # Before the change: if it is interrupted, a later `sync` must still flush the directory.
            self._on_change(_parent(target))
            os.rename(name.rpartition("/")[2], leaf, src_dir_fd=directory, dst_dir_fd=directory)

    def move(self, name: str, target: str) -> None:
        """Rename `name` to `target`, in any directory below root; an older file `target` is replaced."""
        with (
            self._directory_of(name) as (old_directory, old_leaf),
            self._directory_of(target, make=True) as (new_directory, new_leaf),
        ):
            self._on_change(_parent(name))
            self._on_change(_parent(target))
            os.rename(old_leaf, new_leaf, src_dir_fd=old_directory, dst_dir_fd=new_directory)

    def remove_empty_directories(self, prefix: str) -> None:
        """Remove directories in root that begin with `prefix` and contain no files at any depth."""
        with contextlib.suppress(FileNotFoundError), self._descend([]) as root:
            for leaf in _directories_in(root):
                if leaf.startswith(prefix):
                    self._on_change("")
                    self._remove_if_empty(root, leaf)

    def _remove_if_empty(self, parent: int, leaf: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            with opened_directory(leaf, dir_fd=parent) as directory:
                for child in _directories_in(directory):
                    self._remove_if_empty(directory, child)
            # Never looked up first: between the look and the removal, another process may put a file there.
            try:
                os.rmdir(leaf, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def unlink(self, name: str) -> None:
        """Remove a file if it exists. Of a symbolic link, the link is removed and not its target."""
        with contextlib.suppress(FileNotFoundError), self._directory_of(name) as (directory, leaf):
            self._on_change(_parent(name))
            os.unlink(leaf, dir_fd=directory)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the result of lstat; None if there is no such name."""
        with contextlib.suppress(FileNotFoundError), self._directory_of(name) as (directory, leaf):
            return os.stat(leaf, dir_fd=directory, follow_symlinks=False)
        return None

    def flush_directory(self, name: str) -> None:
        """Make the entries of a directory ("" is root) durable, if it exists."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._descend(name.split("/") if name else []) as directory,
        ):
            flush_directory(directory)

    def names(self, prefix: str) -> list[str]:
        """Return the names of all regular files that begin with `prefix`, in no particular order."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError), self._descend([]) as root:
            self._collect(root, "", prefix, names)
        return names

    def require_regular(self, name: str, mode: int) -> None:
        """Raise an error unless `mode` (st_mode) is that of a regular file.

        Raises:
            StorageError: `name` is a link, a directory, a pipe, a socket or a device.
        """
        if not stat.S_ISREG(mode):
            raise StorageError(
                f"{self.path(name)}: it is {_kind(mode)}, not a regular file. A checkpoint consists of "
                "regular files only, so that a forged one cannot make a load read other files. Put the real "
                "file there.",
                path=self.path(name),
            )

    @contextlib.contextmanager
    def _directory_of(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory of `name`, and the last part of the name."""
        check_name(name, location=self.root)
        *parents, leaf = name.split("/")
        with self._descend(parents, make=make) as directory:
            yield directory, leaf

    @contextlib.contextmanager
    def _descend(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of a directory, opened part by part, each relative to the one before.

        Nobody can replace a part of the path by a link between its check and its use.
        """
        directory = os.open(self.root, OPEN_DIRECTORY)
        try:
            for depth, part in enumerate(parts):
                if make:
                    self._make(directory, part, "/".join(parts[:depth]))
                name = "/".join(parts[: depth + 1])
                child = self._open_without_links(directory, part, OPEN_DIRECTORY | os.O_NOFOLLOW, name)
                # Assign before the close: after Ctrl-C between the two, the `finally` below must not close
                # the same number again, which may be that of another thread's file by then.
                parent, directory = directory, child
                os.close(parent)
            yield directory
        finally:
            os.close(directory)

    def _make(self, directory: int, part: str, parent: str) -> None:
        try:
            os.mkdir(part, dir_fd=directory)
        except FileExistsError:
            return
        self._on_change(parent)

    def _open_regular(self, directory: int, leaf: str, name: str) -> int:
        """Open `leaf` in an open directory, which `name` stands for; return the descriptor."""
        descriptor = self._open_without_links(directory, leaf, _OPEN_TO_READ, name)
        try:
            self.require_regular(name, os.fstat(descriptor).st_mode)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _open_without_links(self, directory: int, part: str, flags: int, name: str) -> int:
        try:
            return os.open(part, flags, dir_fd=directory)
        except OSError as error:
            # For a link, O_NOFOLLOW gives ELOOP and O_DIRECTORY gives ENOTDIR: raise a clearer error.
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                mode = os.stat(part, dir_fd=directory, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    self.require_regular(name, mode)
            raise

    def _is_file(self, entry: os.DirEntry[str], name: str) -> bool:
        """Return whether an entry is a file that `open_to_read` opens."""
        return entry.is_file(follow_symlinks=False)

    def _collect(self, directory: int, path: str, prefix: str, names: list[str]) -> None:
        """Append the names of files in and below a directory; path is "" or its name with a slash."""
        # Listed before the recursion, so that only one directory at each depth is open.
        with os.scandir(directory) as entries:
            listed = [
                (e.name, e.is_dir(follow_symlinks=False), self._is_file(e, path + e.name)) for e in entries
            ]
        for leaf, is_directory, is_file in listed:
            name = path + leaf
            # A directory can contain such names if the prefix goes on in it, or ends before its name does.
            if is_directory and (name + "/").startswith(prefix[: len(name) + 1]):
                with (
                    contextlib.suppress(FileNotFoundError),  # deleted meanwhile
                    opened_directory(leaf, dir_fd=directory) as child,
                ):
                    self._collect(child, name + "/", prefix, names)
            elif is_file and name.startswith(prefix) and is_allowed_name(name):
                names.append(name)


@contextlib.contextmanager
def opened_directory(path: str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a directory, whose path is relative to an open one if that is given; no link."""
    descriptor = os.open(path, OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def flush_directory(descriptor: int) -> None:
    """Make the entries of an open directory durable, where the file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
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
