"""The directories of a run's steps in a root: their names, and functions to find, open and remove them.

`run.checkpointer` decides which steps count, and which are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megackpt.engine.checkpoint.removal import is_leftover, remove_saved_files
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import Store
from megackpt.storage.store import is_temporary_name
from megackpt.storage.views import PrefixStore

_MAX_STEP = 1 << 62  # as in `megackpt.ground.arguments.checked_step`
_STEP_DIRECTORY = re.compile(r"iter_(\d{7,})")


def step_name(step: int) -> str:
    """Return the name of the directory of a step."""
    return f"iter_{step:07d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory, or None if `step_name` makes the name of no step.

    >>> step_of("iter_0000100"), step_of("iter_100"), step_of("iter_" + "9" * 30)
    (100, None, None)
    """
    match = _STEP_DIRECTORY.fullmatch(name)
    step = int(match.group(1)) if match else _MAX_STEP + 1
    return step if step <= _MAX_STEP and name == step_name(step) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A file below the directory of a step.

    Attributes:
        name: name relative to that directory.
        nbytes: size.
        modified_s: when it was last written, in seconds since 1970 by the clock of the store; None if the
            store does not know.
    """

    name: str
    nbytes: int
    modified_s: float | None


class StepDirectories:
    """The directories at the top of a root. All methods are local.

    This class works on any store: a directory is the first part of the names of some files, and looking lists
    all names in the store. `LocalSteps` and `ObjectSteps` do the same with fewer operations.

    Attributes:
        location: path or URL of the root, absolute.
        root: the root itself, for small files next to the steps; nobody closes it.
    """

    location: str
    root: Store

    def __init__(self, root: Store, *, location: str | None = None) -> None:
        self.root = root
        self.location = location or root.location

    def names(self) -> list[str]:
        """Return the names of the directories, in no particular order; none if the root does not exist."""
        return sorted({name.partition("/")[0] for name in self.root.names() if "/" in name})

    def temporary_files(self) -> list[str]:
        """Return the files of the root, not of steps, that look like temporary files of a dead process."""
        return [name for name in self.root.names(".") if is_temporary_name(name)]

    def committed(self, names: Iterable[str]) -> list[str]:
        """Return the directories that have a commit."""
        return [name for name in names if self.root.exists(f"{name}/{MANIFEST}")]

    def is_leftover(self, name: str) -> bool:
        """Return whether a directory holds no commit, and only files that a save has written."""
        return is_leftover(self.open(name))

    def open(self, name: str) -> Store:
        """Return the store of a directory; the caller closes it."""
        return PrefixStore(self.root, name)

    def idle_s(self, name: str) -> float | None:
        """Return how long ago anything in a directory was written, in seconds; None if it is not known.

        By the clocks of this machine and of the store, which may differ; never below 0.
        """
        return None

    def files(self, name: str) -> list[StepFile] | None:
        """Return the files of a directory, whoever wrote them; None if it is gone.

        Files may be removed while this runs.
        """
        store = self.open(name)
        sizes = [(file, store.size(file)) for file in store.names()]
        return [StepFile(name=file, nbytes=nbytes, modified_s=None) for file, nbytes in sizes] or None

    def remove(self, name: str) -> None:
        """Remove a directory. Its commit is removed first, so that no part of it can be loaded.

        Raises:
            OSError: it could not be removed completely; the rest is not a checkpoint.
        """
        store = self.open(name)
        remove_saved_files(store)
        store.delete(store.names())
        store.sync()

    def prune(self, name: str) -> None:
        """Remove a directory that holds no files, if directories exist apart from their files."""
