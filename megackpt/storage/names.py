"""Names of files that are written beside another, to be renamed to it.

Owns the rule, by which what a crash has left is known; see docs/format.md.
"""

from __future__ import annotations

import re
import secrets

_END = r"\.[0-9a-f]{16}\.tmp"
_BESIDE = re.compile(rf"\..+{_END}")


def temporary_name(name: str) -> str:
    """Return a new name in the directory of a file."""
    head, slash, leaf = name.rpartition("/")
    return f"{head}{slash}.{leaf}.{secrets.token_hex(8)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Say whether a name was made by `temporary_name`, for any file."""
    return _BESIDE.fullmatch(name.rpartition("/")[2]) is not None


def is_temporary_name_of(name: str, file: str) -> bool:
    """Say whether a name was made by `temporary_name` for this file."""
    head, slash, leaf = file.rpartition("/")
    return re.fullmatch(re.escape(f"{head}{slash}.{leaf}") + _END, name) is not None
