"""Roots of a run's steps on a file system and in an object store; `step_directories` chooses between them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megackpt.engine.checkpoint.removal import is_leftover, remove_saved_files
from megackpt.engine.checkpoint.steps import StepDirectories, StepFile
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import (
    LocalStore,
    ObjectOptions,
    ObjectStore,
    Store,
    absolute_path,
    as_store,
    checked_path,
    is_in_memory,
    is_url,
    open_store,
)
from megackpt.storage.error_translation import translated_errors
from megackpt.storage.opening import is_object_url

_CONCURRENT_REQUESTS = 16  # when many steps are looked up


def step_directories(
    root: str | os.PathLike[str] | Store, *, objects: ObjectOptions | None
) -> StepDirectories:
    """Return the directories below a root. A relative path stays valid after a change of directory.

    Args:
        root: path, URL or store of the root.
        objects: options of the object store, if the root is in one.

    Raises:
        DeclarationError: root is none of these.
        StorageError: it is an URL that no store serves, or empty.
    """
    if not isinstance(root, (str, os.PathLike)):
        return StepDirectories(as_store(root))
    text = checked_path(root)
    if is_object_url(text):
        return ObjectSteps(text, objects)
    if is_url(text):
        return StepDirectories(open_store(text), location=text)
    return LocalSteps.at(text)


class LocalSteps(StepDirectories):
    """Directories below a directory of a file system."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalStore(root), location=str(root))
        self._root = root

    @classmethod
    def at(cls, path: str) -> LocalSteps:
        """Return the directories below a path, which stays valid after a change of directory."""
        return cls(Path(absolute_path(path)))

    def names(self) -> list[str]:
        """Return the names of the directories, and of links to some."""
        with translated_errors("list", self.location), contextlib.suppress(FileNotFoundError):
            return [entry.name for entry in self._root.iterdir() if entry.is_dir()]
        return []

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return the directories that have a commit."""
        return [name for name in names if (self._root / name / MANIFEST).is_file()]

    def is_leftover(self, name: str) -> bool:
        """Return whether a directory is a leftover.

        A link never is one, nor a directory with anything under the name of a commit.
        """
        entry = self._root / name
        has_commit = os.path.lexists(entry / MANIFEST)  # also a pipe, for which a store raises an error
        return not entry.is_symlink() and not has_commit and is_leftover(LocalStore(entry))

    def open(self, name: str) -> Store:
        """Return the store of a directory."""
        return LocalStore(self._root / name)

    def idle_s(self, name: str) -> float | None:
        """Return how long ago a file was written, or put into a directory."""
        newest = -1.0
        for directory, _, files in os.walk(self._root / name):
            for path in (directory, *(os.path.join(directory, file) for file in files)):
                with contextlib.suppress(OSError):  # removed meanwhile
                    newest = max(newest, os.lstat(path).st_mtime)
        return None if newest < 0 else max(0.0, time.time() - newest)

    def files(self, name: str) -> list[StepFile] | None:
        """Return the files of a directory; None if it is gone."""
        root, step_files = self._root / name, []
        for directory, _, files in os.walk(root):
            for file in files:
                path = os.path.join(directory, file)
                with contextlib.suppress(OSError):  # removed meanwhile
                    status = os.lstat(path)
                    relative = os.path.relpath(path, root)
                    step_files.append(
                        StepFile(name=relative, nbytes=status.st_size, modified_s=status.st_mtime)
                    )
        # os.walk reports no error for a directory that is gone.
        return step_files if root.exists() else None

    def remove(self, name: str) -> None:
        """Remove a directory. Of a link, for example to a step of another run, remove only the link."""
        directory = self._root / name
        if directory.is_symlink():
            directory.unlink()
            return
        with contextlib.closing(LocalStore(directory)) as store:
            # The commit first: rmtree removes files in any order, and may be interrupted.
            remove_saved_files(store)
        shutil.rmtree(directory)

    def new_directory(self, name: str) -> str:
        """Create a directory in the root that did not exist: `name-1`, or the next free number; return it.

        Raises:
            StorageError: it cannot be created.
        """
        for number in itertools.count(1):
            path = self._root / f"{name}-{number}"
            with translated_errors("create", str(path)), contextlib.suppress(FileExistsError):
                path.mkdir()
                return str(path)
        raise AssertionError("count does not end")

    def move(self, name: str, directory: str) -> None:
        """Move a directory into another one of the same file system, durably.

        Raises:
            StorageError: it could not be moved, and stays.
        """
        source = self._root / name
        with translated_errors("move", str(source)):
            os.rename(source, Path(directory) / name)
        for parent in (Path(directory), self._root):
            with contextlib.closing(LocalStore(parent)) as store:
                store.sync()

    def identity(self) -> str:
        """Return a text that no other directory on any machine has. The root is created.

        Raises:
            StorageError: the root cannot be created.
        """
        with contextlib.closing(LocalStore(self._root)) as store:
            store.create()
            store.sync()
        status = os.stat(self._root)
        return f"{_machine_id()}:{status.st_dev}:{status.st_ino}"

    def is_in_memory(self) -> bool:
        """Return whether the root, which exists, is on a file system in memory."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return is_in_memory(descriptor)
        finally:
            os.close(descriptor)

    def prune(self, name: str) -> None:
        """Remove a directory and the directories below it, if none of them holds a file."""
        directory = self._root / name
        if directory.is_symlink() or not directory.is_dir():
            return
        with contextlib.closing(LocalStore(directory)) as store:
            if not store.names():
                store.remove_empty_directories()
                with contextlib.suppress(OSError):  # it holds something else, for example a link
                    directory.rmdir()


class ObjectSteps(StepDirectories):
    """Prefixes below an URL.

    Looking takes one listing for each 1,000 steps, without their files, and one request for each step.
    """

    def __init__(self, url: str, options: ObjectOptions | None) -> None:
        self._options = options
        self._store = ObjectStore(url, options=options)
        super().__init__(self._store)

    def temporary_files(self) -> list[str]:
        """Return nothing: an object exists completely or not at all."""
        return []

    def names(self) -> list[str]:
        """Return the first parts of names."""
        return self._store.directories()

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return the directories that have a commit."""
        names = list(names)
        if not names:
            return []
        count = min(_CONCURRENT_REQUESTS, len(names))
        with ThreadPoolExecutor(count, thread_name_prefix="megackpt-steps") as threads:
            exist = threads.map(lambda name: self._store.exists(f"{name}/{MANIFEST}"), names)
            return [name for name, exists in zip(names, exist, strict=True) if exists]

    def is_leftover(self, name: str) -> bool:
        """Return whether a directory is a leftover."""
        with contextlib.closing(self.open(name)) as store:
            return is_leftover(store)

    def open(self, name: str) -> ObjectStore:
        """Return the store of a prefix; the caller closes it."""
        return ObjectStore(f"{self.location}/{name}", options=self._options)

    def idle_s(self, name: str) -> float | None:
        """Return how long ago an object was written; one request for each 1,000 objects."""
        with contextlib.closing(self.open(name)) as store:
            newest = store.last_modified()
        return None if newest is None else max(0.0, time.time() - newest)

    def files(self, name: str) -> list[StepFile] | None:
        """Return the objects of a prefix; one request for each 1,000 objects."""
        with contextlib.closing(self.open(name)) as store:
            entries = list(store.entries())
        return [StepFile(name=n, nbytes=size, modified_s=time_s) for n, size, time_s in entries] or None

    def remove(self, name: str) -> None:
        """Remove all objects of a prefix."""
        with contextlib.closing(self.open(name)) as store:
            remove_saved_files(store)
            store.delete(store.names())


def _machine_id() -> str:
    """Return a text that no other machine has until this one restarts; its containers share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
