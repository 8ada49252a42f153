"""Where the steps of a run lie: directories below a root, on a file system or in an object store.

Owns what they are called, finding and removing them. Which steps count, and which are kept, is up to
`checkpointer`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megackpt.engine.checkpoint.manifest import files_of_saves, is_leftover
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
from megackpt.storage.names import is_temporary_name
from megackpt.storage.opening import is_object_url
from megackpt.storage.views import PrefixStore

_AT_ONCE = 16  # requests, when many steps are looked at
_MOST = 1 << 62  # as `megackpt.arguments.checked_step` has it
_STEP_DIRECTORY = re.compile(r"iter_(\d{7,})")


def step_name(step: int) -> str:
    """Return the name of the directory of a step."""
    return f"iter_{step:07d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory; None for a name that `step_name` does not make of any step.

    >>> step_of("iter_0000100"), step_of("iter_100"), step_of("iter_" + "9" * 30)
    (100, None, None)
    """
    match = _STEP_DIRECTORY.fullmatch(name)
    step = int(match.group(1)) if match else _MOST + 1
    return step if step <= _MOST and name == step_name(step) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A file below the directory of a step.

    Attributes:
        name: relative to that directory.
        nbytes: its size.
        modified_s: when it was last written, in seconds since 1970 by the clock of the store; None where the
            store does not tell.
    """

    name: str
    nbytes: int
    modified_s: float | None


class StepDirectories(Protocol):
    """The directories at the top of a root. All of it is local; no rank waits for another."""

    @property
    def location(self) -> str:
        """Path or URL of the root, absolute."""

    def names(self) -> list[str]:
        """Return the names of the directories, in no particular order; none where there is no root."""

    @property
    def root(self) -> Store:
        """The root itself, for small files beside the steps. It is not closed."""

    def halves(self) -> list[str]:
        """Return the files of the root, not of steps, that look like what a `replace` leaves if it dies."""

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return those that hold a commit."""

    def is_leftover(self, name: str) -> bool:
        """Say whether a directory holds no commit, and nothing but what a save has written."""

    def open(self, name: str) -> Store:
        """Return the store of a directory; it is closed by the caller."""

    def idle_s(self, name: str) -> float | None:
        """Return how long ago anything in a directory was written, in seconds; None if nobody can say.

        By the clocks of this machine and of the store, which may differ; never below 0.
        """

    def files(self, name: str) -> list[StepFile] | None:
        """Return the files of a directory, whoever wrote them; None if it is gone. Files may go meanwhile."""

    def remove(self, name: str) -> None:
        """Remove a directory: first what makes it a checkpoint, so that it is never a loadable half.

        Raises:
            OSError: it could not be removed completely; what is left is no checkpoint.
        """

    def prune(self, name: str) -> None:
        """Remove a directory that holds no files, where directories are something of their own."""


def step_directories(
    root: str | os.PathLike[str] | Store, *, objects: ObjectOptions | None
) -> StepDirectories:
    """Return the places below a root. A relative path means the same after a change of directory.

    objects are the options of an object store, if the root is in one.

    Raises:
        DeclarationError: it is no root.
        StorageError: it is an URL that no store serves, or empty.
    """
    if not isinstance(root, (str, os.PathLike)):
        return StoreSteps(as_store(root))
    text = checked_path(root)
    if is_object_url(text):
        return ObjectSteps(text, objects)
    if is_url(text):
        return StoreSteps(open_store(text), location=text)
    return LocalSteps.at(text)


class LocalSteps:
    """Directories below one of a file system. See `StepDirectories`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = LocalStore(root)

    @classmethod
    def at(cls, path: str) -> LocalSteps:
        """Return those below a path, which means the same after a change of directory."""
        return cls(Path(absolute_path(path)))

    @property
    def location(self) -> str:
        """The path of the root."""
        return str(self._root)

    @property
    def root(self) -> Store:
        """The store of the root."""
        return self._store

    def halves(self) -> list[str]:
        """Return such files; those of ours all begin with a dot."""
        return _halves_in(self._store)

    def names(self) -> list[str]:
        """Return the names of the directories, and of links to some."""
        with translated_errors("list", self.location), contextlib.suppress(FileNotFoundError):
            return [entry.name for entry in self._root.iterdir() if entry.is_dir()]
        return []

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return those that hold a commit."""
        return [name for name in names if (self._root / name / MANIFEST).is_file()]

    def is_leftover(self, name: str) -> bool:
        """Say whether it is one; a link never is, nor what has anything else under the name of a commit."""
        entry = self._root / name
        has_commit = os.path.lexists(entry / MANIFEST)  # maybe as a pipe, which a store would refuse
        return not entry.is_symlink() and not has_commit and is_leftover(LocalStore(entry))

    def open(self, name: str) -> Store:
        """Return the store of a directory."""
        return LocalStore(self._root / name)

    def idle_s(self, name: str) -> float | None:
        """Return how long ago a file was written, or put into a directory."""
        newest = -1.0
        for directory, _, files in os.walk(self._root / name):
            for path in (directory, *(os.path.join(directory, file) for file in files)):
                with contextlib.suppress(OSError):  # gone meanwhile
                    newest = max(newest, os.lstat(path).st_mtime)
        return None if newest < 0 else max(0.0, time.time() - newest)

    def files(self, name: str) -> list[StepFile] | None:
        """Return the files of a directory; None if it is gone."""
        root, found = self._root / name, []
        for directory, _, files in os.walk(root):
            for file in files:
                path = os.path.join(directory, file)
                with contextlib.suppress(OSError):  # gone meanwhile
                    status = os.lstat(path)
                    relative = os.path.relpath(path, root)
                    found.append(StepFile(name=relative, nbytes=status.st_size, modified_s=status.st_mtime))
        return found if root.exists() else None

    def remove(self, name: str) -> None:
        """Remove a directory; of a link, to a step of another run, only the link."""
        directory = self._root / name
        if directory.is_symlink():
            directory.unlink()
            return
        with contextlib.closing(LocalStore(directory)) as store:
            _remove_saved(store)
        shutil.rmtree(directory)

    def identity(self) -> str:
        """Return what tells the root, which is made, from every other directory on any machine. Local.

        Raises:
            StorageError: it cannot be made.
        """
        with contextlib.closing(LocalStore(self._root)) as store:
            store.create()
            store.sync()
        found = os.stat(self._root)
        return f"{_machine()}:{found.st_dev}:{found.st_ino}"

    def is_in_memory(self) -> bool:
        """Say whether the root, which is there, lies on a file system without a disk."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return is_in_memory(descriptor)
        finally:
            os.close(descriptor)

    def prune(self, name: str) -> None:
        """Remove the directory, with directories below it, if there is no file in any of them."""
        directory = self._root / name
        if directory.is_symlink() or not directory.is_dir():
            return
        with contextlib.closing(LocalStore(directory)) as store:
            if not store.names():
                store.remove_empty_directories()
                with contextlib.suppress(OSError):  # what is not ours lies in it: a link, say
                    directory.rmdir()


class StoreSteps:
    """Names that begin alike in any store. See `StepDirectories`. Looking lists all that is in the store."""

    def __init__(self, store: Store, *, location: str | None = None) -> None:
        self._store = store
        self._location = location

    @property
    def location(self) -> str:
        """The URL that led to the store, or what the store is called."""
        return self._location or self._store.location

    @property
    def root(self) -> Store:
        """The store."""
        return self._store

    def halves(self) -> list[str]:
        """Return such files; those of ours all begin with a dot."""
        return _halves_in(self._store)

    def names(self) -> list[str]:
        """Return the first parts of names that have several."""
        return sorted({name.partition("/")[0] for name in self._store.names() if "/" in name})

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return those that hold a commit."""
        return [name for name in names if self._store.exists(f"{name}/{MANIFEST}")]

    def is_leftover(self, name: str) -> bool:
        """Say whether it is one."""
        return is_leftover(self.open(name))

    def open(self, name: str) -> Store:
        """Return the store of a directory."""
        return PrefixStore(self._store, name)

    def idle_s(self, name: str) -> float | None:
        """Return None: stores do not tell."""
        return None

    def files(self, name: str) -> list[StepFile] | None:
        """Return the files of a directory; when they were written is not known."""
        store = self.open(name)
        sizes = [(file, store.size(file)) for file in store.names()]
        return [StepFile(name=file, nbytes=nbytes, modified_s=None) for file, nbytes in sizes] or None

    def remove(self, name: str) -> None:
        """Remove all files of a directory."""
        store = self.open(name)
        _remove_saved(store)
        store.delete(store.names())
        store.sync()

    def prune(self, name: str) -> None:
        """Do nothing: directories are parts of names."""


class ObjectSteps:
    """Prefixes below an URL. See `StepDirectories`.

    Looking is one listing for each 1,000 steps, not of what is in them, and a request a step.
    """

    def __init__(self, url: str, options: ObjectOptions | None) -> None:
        self._options = options
        self._store = ObjectStore(url, options=options)

    @property
    def location(self) -> str:
        """The URL of the root."""
        return self._store.location

    @property
    def root(self) -> Store:
        """The store of the root."""
        return self._store

    def halves(self) -> list[str]:
        """Return nothing: an object is there completely or not at all."""
        return []

    def names(self) -> list[str]:
        """Return the first parts of names."""
        return self._store.directories()

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return those that hold a commit."""
        asked = list(names)
        if not asked:
            return []
        with ThreadPoolExecutor(min(_AT_ONCE, len(asked)), thread_name_prefix="megackpt-steps") as threads:
            found = threads.map(lambda name: self._store.exists(f"{name}/{MANIFEST}"), asked)
            return [name for name, is_there in zip(asked, found, strict=True) if is_there]

    def is_leftover(self, name: str) -> bool:
        """Say whether it is one."""
        with contextlib.closing(self.open(name)) as store:
            return is_leftover(store)

    def open(self, name: str) -> Store:
        """Return the store of a prefix."""
        return ObjectStore(f"{self.location}/{name}", options=self._options)

    def idle_s(self, name: str) -> float | None:
        """Return how long ago an object was put: a request for each 1,000."""
        with contextlib.closing(ObjectStore(f"{self.location}/{name}", options=self._options)) as store:
            newest = store.last_modified()
        return None if newest is None else max(0.0, time.time() - newest)

    def files(self, name: str) -> list[StepFile] | None:
        """Return the objects of a prefix: a request for each 1,000."""
        with contextlib.closing(ObjectStore(f"{self.location}/{name}", options=self._options)) as store:
            return [
                StepFile(name=n, nbytes=size, modified_s=time_s) for n, size, time_s in store.entries()
            ] or None

    def remove(self, name: str) -> None:
        """Remove all objects of a prefix."""
        with contextlib.closing(self.open(name)) as store:
            _remove_saved(store)
            store.delete(store.names())

    def prune(self, name: str) -> None:
        """Do nothing: prefixes are parts of names."""


def _halves_in(root: Store) -> list[str]:
    return [name for name in root.names(".") if is_temporary_name(name)]


def _remove_saved(store: Store) -> None:
    """Remove what makes a directory a checkpoint, then what saves have written.

    Files of a known format that has no metadata.json of its own, and of others, may be left.
    """
    store.delete([MANIFEST])
    store.sync()  # or a loss of power could bring it back when other files are gone
    store.delete(files_of_saves(store))  # in an order in which a torn step stays a torn step


def _machine() -> str:
    """Return what tells this machine from others until it is started again; its containers say the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
