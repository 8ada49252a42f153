"""What is wrong with a stored checkpoint, one thing at a time.

Owns how a fault is named: which file, which bytes of it, and of which chunk they are. Finding faults is up to
formats, for their own files, and to `megackpt.engine.verification.verify`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megackpt.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One fault.

    Attributes:
        what: what is wrong, in words.
        file: name of the file in the checkpoint; empty if no single file is at fault.
        key: array or object that is concerned, if it is one.
        box: of which chunk, as `ChunkTable.describe` writes it.
        start: first byte of the file that is concerned, if it is not all of it.
        stop: one past the last.
    """

    what: str
    file: str = ""
    key: str | None = None
    box: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        bytes_of = f"bytes {self.start}:{self.stop} of " if self.start is not None else ""
        chunk = " ".join(filter(None, (repr(self.key) if self.key is not None else "", self.box)))
        place = ", ".join(filter(None, (f"{bytes_of}{self.file}" if self.file else "", chunk)))
        return f"{place}: {self.what}" if place else self.what

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def damage_of(error: CheckpointError, *, location: str, file: str = "") -> Damage:
    """Return what an error says; location is the store's, and file what it is about if it does not say."""
    path = error.path or ""
    inside = path.removeprefix(f"{location}/") if path.startswith(f"{location}/") else ""
    return Damage(what=" ".join(str(error).split()), file=inside or file, key=error.key)
