"""One fault of a stored checkpoint: in which file, in which of its bytes, and of which chunk they are.

Formats find the faults of their own files, `megackpt.engine.verification.verify` those of chunks.
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
        key: the array or object, if it is a single one.
        box: the chunk, as `ChunkTable.describe` writes it.
        start: first wrong byte of the file, if it is not the whole file.
        stop: one past the last.
    """

    what: str
    file: str = ""
    key: str | None = None
    box: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        byte_range = f"bytes {self.start}:{self.stop} of " if self.start is not None else ""
        chunk = " ".join(filter(None, (repr(self.key) if self.key is not None else "", self.box)))
        location = ", ".join(filter(None, (f"{byte_range}{self.file}" if self.file else "", chunk)))
        return f"{location}: {self.what}" if location else self.what

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known. Pure."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def damage_of(error: CheckpointError, *, location: str, file: str = "") -> Damage:
    """Return an error as damage; location is the store's, and file the one at fault if the error has none."""
    path = error.path or ""
    relative = path.removeprefix(f"{location}/") if path.startswith(f"{location}/") else ""
    return Damage(what=" ".join(str(error).split()), file=relative or file, key=error.key)
