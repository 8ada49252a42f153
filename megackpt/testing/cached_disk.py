"""A disk behind a page cache, in memory: what has been written, and what of it a loss of power leaves.

It knows which contents and which names are durable, and what may be there after a loss of power. `CrashStore`
decides what is made durable, and when the power goes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field


class Loss(enum.Enum):
    """What is left when everything stops: the system may have written back any part of its cache by then."""

    NOTHING = "nothing"
    """Only the process was killed: all that was written is there."""
    EVERYTHING = "everything"
    """Nothing is left that was not flushed."""
    CONTENT = "content"
    """Names are there as they were last; content that was not flushed is missing."""
    CREATIONS = "creations"
    """Of the names that were not flushed, those that were removed are gone, and new ones are missing."""
    REMOVALS = "removals"
    """Of the names that were not flushed, new ones are there, and those that were removed are back."""


@dataclass(slots=True, eq=False)
class CachedFile:
    """One file, whatever its names are.

    Attributes:
        content: as processes see it.
        durable: what is left of it without the cache.
    """

    content: bytes = b""
    durable: bytes = b""

    def flush(self) -> None:
        """Make the content durable."""
        self.durable = self.content


@dataclass(slots=True)
class CachedDisk:
    """A directory of files. Used by one thread at a time.

    Attributes:
        seen: files by name, as processes see them.
        durable: files by name, as they are found without the cache.
        moves: new name to old name of what was moved, while that is not durable.
    """

    seen: dict[str, CachedFile] = field(default_factory=dict)
    durable: dict[str, CachedFile] = field(default_factory=dict)
    moves: dict[str, str] = field(default_factory=dict)

    @classmethod
    def holding(cls, files: dict[str, bytes]) -> CachedDisk:
        """Return a disk with durable files."""
        cached = {name: CachedFile(content, content) for name, content in files.items()}
        return cls(seen=dict(cached), durable=dict(cached))

    def flush_names(self, names: Iterable[str]) -> None:
        """Make durable that names are there, or are not; of a file that was moved both names at once."""
        for name in names:
            if name in self.seen:
                self.durable[name] = self.seen[name]
            else:
                self.durable.pop(name, None)
            if (old := self.moves.pop(name, None)) is not None:
                self.flush_names([old])

    def files_after(self, loss: Loss) -> dict[str, bytes]:
        """Return the files that are found when everything has stopped, by name."""
        if loss is Loss.NOTHING:
            return {name: file.content for name, file in self.seen.items()}
        if loss is Loss.EVERYTHING:
            files = self.durable
        elif loss is Loss.CONTENT:
            files = self.seen
        elif loss is Loss.CREATIONS:
            moved_from = set(self.moves.values())  # a move is lost as a whole
            kept = {n: f for n, f in self.durable.items() if n in self.seen or n in moved_from}
            files = kept
        else:
            moved_from = set(self.moves.values())  # a move happens as a whole
            back = {n: f for n, f in self.durable.items() if n not in self.seen and n not in moved_from}
            files = self.seen | back
        whole = loss is Loss.REMOVALS
        return {name: file.content if whole else file.durable for name, file in files.items()}
