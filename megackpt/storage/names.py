"""Names of files in a store: which ones are allowed, and the names of temporary files."""

from __future__ import annotations

import re
import secrets

from megackpt.errors import StorageError

_TEMPORARY_END = r"\.[0-9a-f]{16}\.tmp"
_TEMPORARY = re.compile(rf"\..+{_TEMPORARY_END}")


def check_name(name: str, *, location: str) -> None:
    """Reject a name that could mean a file outside of the store, or that some systems cannot store.

    Raises:
        StorageError: `name` is empty, absolute, has an empty, '.' or '..' part, a backslash, a NUL or a
            character that UTF-8 cannot encode.

    >>> check_name("data/rank-00000.safetensors", location="/ckpt")
    """
    fault = _fault_of(name)
    if fault is not None:
        raise StorageError(
            f"{location}: the file name {name!r} {fault}, so it is not allowed. Names inside a checkpoint "
            "are relative, with parts joined by '/'. If it was read from a checkpoint, that checkpoint is "
            "damaged or forged.",
            path=location,
        )


def is_allowed_name(name: str) -> bool:
    """Return whether `check_name` accepts a name."""
    return _fault_of(name) is None


def _fault_of(name: str) -> str | None:
    if not name:
        return "is empty"
    if name.startswith("/"):
        return "is absolute"
    if "\0" in name:
        return "contains a NUL"
    if "\\" in name:
        return "contains a backslash"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
    return None


# A file that must change at once is written under a temporary name in the same directory, then renamed. A
# crash leaves the temporary file; its name tells the next save that it can be deleted. See docs/format.md.


def temporary_name(name: str) -> str:
    """Return a new name for a temporary file in the directory of the file `name`."""
    head, slash, leaf = name.rpartition("/")
    return f"{head}{slash}.{leaf}.{secrets.token_hex(8)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Return whether a name was made by `temporary_name`, for any file."""
    return _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None


def is_temporary_name_of(name: str, file: str) -> bool:
    """Return whether a name was made by `temporary_name` for this file."""
    head, slash, leaf = file.rpartition("/")
    return re.fullmatch(re.escape(f"{head}{slash}.{leaf}") + _TEMPORARY_END, name) is not None
