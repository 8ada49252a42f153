"""File names of the format torch_dist as megackpt writes it.

Three names are fixed by those who defined the format: `.metadata`, `common.pt` and `metadata.json`. Every
other file carries the attempt that wrote it, so that a new save never touches the bytes of a committed one.
"""

from __future__ import annotations

import re

BACKEND = "torch_dist"
VERSION = 1

METADATA = ".metadata"
COMMON = "common.pt"
VALUES_ENTRIES = ("values", "value_objects")
"""Entries of a note that name files of copies for DCP."""

_COMMON = re.compile(r"common-[0-9a-f]{16}\.pt")
_VALUES = re.compile(r"values-[0-9a-f]{16}-(?:state|objects)\.distcp")


def data_file(attempt: str, rank: int, number: int) -> str:
    """Return the name of one of the data files of a rank."""
    return f"__{rank}_{number}_{attempt}.distcp"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a data file, also one of DCP; None for any other file."""
    match = re.fullmatch(r"__(\d+)_\d+(?:_[0-9a-f]{16})?\.distcp", name)
    return int(match.group(1)) if match else None


def index_file(attempt: str, *, revision: int = 0) -> str:
    """Return the name of our own index; revisions above 0 are later ones, with fewer arrays."""
    return f"megackpt-{attempt}-{revision:05d}.safetensors" if revision else f"megackpt-{attempt}.safetensors"


def revision_of(index: str) -> int:
    """Return the revision in the name of an index."""
    match = re.fullmatch(r"megackpt-[0-9a-f]{16}-(\d{5,})\.safetensors", index)
    return int(match.group(1)) if match else 0


def note_file(attempt: str, metadata_digest: str) -> str:
    """Return the name of the note about the `.metadata` with this digest."""
    return f"megackpt-{attempt}-{metadata_digest}.json"


def note_of(name: str) -> tuple[str, str] | None:
    """Return attempt and digest in the name of a note; None for any other file."""
    match = re.fullmatch(r"megackpt-([0-9a-f]{16})-([0-9a-f]{32})\.json", name)
    return (match.group(1), match.group(2)) if match else None


def common_file(attempt: str) -> str:
    """Return the name of an attempt's own copy of common.pt."""
    return f"common-{attempt}.pt"


def staged_metadata_file(attempt: str) -> str:
    """Return the name of the file that becomes `.metadata` at the commit."""
    return f"metadata-{attempt}.pickle"


def values_file(attempt: str, kind: str) -> str:
    """Return the name of an attempt's copies for DCP; kind is `state` (of common state) or `objects`."""
    return f"values-{attempt}-{kind}.distcp"


def is_values_file(name: str, *, kind: str = "") -> bool:
    """Return whether a file has copies of values for DCP, of one kind or of any."""
    return _VALUES.fullmatch(name) is not None and name.endswith(f"{kind}.distcp")


def is_attempts_common(name: str) -> bool:
    """Return whether a file is an attempt's own copy of common.pt."""
    return _COMMON.fullmatch(name) is not None
