"""File names of the native format.

Every file but metadata.json carries the attempt that wrote it, so that a new save never touches the bytes of
a committed one.
"""

from __future__ import annotations

import re

BACKEND = "megackpt"
VERSION = 1


def data_file(attempt: str, rank: int) -> str:
    """Return the name of the data file of a rank."""
    return f"data/{attempt}-{rank:05d}.safetensors"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a data file; None for any other file."""
    match = re.fullmatch(r"data/[0-9a-f]{16}-(\d{5,})\.safetensors", name)
    return int(match.group(1)) if match else None


def index_file(attempt: str, *, revision: int = 0) -> str:
    """Return the name of the index; revisions above 0 are later ones, with fewer arrays."""
    return f"index-{attempt}-{revision:05d}.safetensors" if revision else f"index-{attempt}.safetensors"


def revision_of(name: str) -> int:
    """Return the revision in the name of an index, or of a list of parity files."""
    match = re.fullmatch(r"(?:index|parity)-[0-9a-f]{16}-(\d{5,})\.(?:safetensors|json)", name)
    return int(match.group(1)) if match else 0


def common_file(attempt: str) -> str:
    """Return the name of the JSON tree of the common state."""
    return f"common-{attempt}.json"


def common_tensors_file(attempt: str) -> str:
    """Return the name of the file with the tensors of the common state."""
    return f"common-{attempt}.safetensors"


def parity_file(attempt: str, number: int) -> str:
    """Return the name of the parity file of a group of data files."""
    return f"parity/{attempt}-{number:05d}.safetensors"


def parity_list(attempt: str, *, revision: int = 0) -> str:
    """Return the name of the list of parity files; revisions above 0 are later ones, with fewer files."""
    return f"parity-{attempt}-{revision:05d}.json" if revision else f"parity-{attempt}.json"
