"""One fault of a stored checkpoint: its file, the range of bytes, and the chunk that has these bytes.

Formats find the faults of their own files, `megackpt.engine.verification.verify` those of chunks.
"""

from __future__ import annotations

import contextlib
import errno
from dataclasses import asdict, dataclass
from typing import Any

from megackpt.errors import CheckpointError, StorageError
from megackpt.storage import Store


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
    """Return an error of a check as damage. Arguments are those of `described_error`.

    Raises:
        StorageError: it is the error, because this user may not read the file: that is no damage.
    """
    raise_if_denied(error)
    return described_error(error, location=location, file=file)


def raise_if_denied(error: CheckpointError) -> None:
    """Raise an error again if it says that this user may not read a file: nothing is known about the file.

    Raises:
        StorageError: it is the error.
    """
    if isinstance(error, StorageError) and error.errno in (errno.EACCES, errno.EPERM):
        raise error


def described_error(error: CheckpointError, *, location: str, file: str = "") -> Damage:
    """Return any error, with the file that it names.

    Args:
        error: raised by a read.
        location: of the store.
        file: the file, if the error names none.
    """
    path = error.path or ""
    relative = path.removeprefix(f"{location}/") if path.startswith(f"{location}/") else ""
    is_lost = relative and isinstance(error, StorageError) and error.errno == errno.ENOENT
    what = "it is missing" if is_lost else " ".join(str(error).split())
    return Damage(what=what, file=relative or file, key=error.key)


def size_of(store: Store, name: str) -> int | None:
    """Return the size of a file in bytes; None if the store cannot look it up.

    That is so for a missing file, and for a name that is not that of a regular file, such as a symbolic link.
    """
    try:
        return store.size(name)
    except CheckpointError:
        return None


def why_not_found(store: Store, name: str, error: CheckpointError) -> str:
    """Return why a file cannot be looked up: "it is missing", or the text of the error that this raised.

    Raises:
        StorageError: it is the error, because this user may not look the file up.
    """
    raise_if_denied(error)
    with contextlib.suppress(CheckpointError):
        if not store.exists(name):
            return "it is missing"
    return " ".join(str(error).removeprefix(f"{store.location}/{name}: ").split())
