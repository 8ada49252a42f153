"""Damage of a step that sizes show: files that are missing, or have another size than was stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megackpt.errors import CheckpointError
from megackpt.storage import LocalStore, Store

_MAX_INDEX_BYTES = 16 * 1024 * 1024  # a larger index is not read for a list of steps


def wrong_size(store: Store, files: Mapping[str, int]) -> str:
    """Return the first file that is wrong, as text; empty if no size is wrong. Local.

    The commit is read, and on a file system a small index. In an object store only files that the commit
    names are compared: the index would take another request for each step.

    Args:
        store: a committed step.
        files: its files, with their sizes in bytes.
    """
    from megackpt.engine.checkpoint.manifest import read_manifest
    from megackpt.formats.registry import load_strategy

    try:
        manifest = read_manifest(store)
        entries = load_strategy(manifest, where=store.location).published_entries(store, manifest)
        named = _named_files(entries)
        if wrong := _first_wrong(named, files):
            return wrong
        index = entries.get("index")
        nbytes = index.get("nbytes", 0) if isinstance(index, dict) else 0
        if isinstance(store, LocalStore) and nbytes <= _MAX_INDEX_BYTES:
            exact, least = _files_of_chunks(store)
            return _first_wrong(exact, files, least)
    except CheckpointError as error:
        return " ".join(str(error).split())
    return ""


def _named_files(entries: Mapping[str, Any]) -> dict[str, int]:
    """Return the files that a commit names, with their sizes."""
    return {
        entry["file"]: entry["nbytes"]
        for entry in entries.values()
        if isinstance(entry, dict) and isinstance(entry.get("file"), str) and type(entry.get("nbytes")) is int
    }


def _files_of_chunks(store: Store) -> tuple[dict[str, int], dict[str, int]]:
    """Return the files of chunks whose size the format knows; and how long the others must be at least."""
    from megackpt.engine.checkpoint.opening import open_checkpoint

    contents = open_checkpoint(store)
    ranges = contents.chunks(sorted(contents.arrays)).file_ranges()
    if ranges is None:
        return {}, {}
    least = np.zeros(len(ranges.files), np.int64)
    np.maximum.at(least, ranges.file, ranges.stop)
    exact = {name: int(n) for name, n in zip(ranges.files, ranges.nbytes, strict=True) if n >= 0}
    return exact, {name: int(n) for name, n in zip(ranges.files, least, strict=True) if name not in exact}


def _first_wrong(
    exact: Mapping[str, int], files: Mapping[str, int], least: Mapping[str, int] | None = None
) -> str:
    least = least or {}
    for name, nbytes in sorted({**exact, **least}.items()):
        size = files.get(name)
        if size is None:
            return f"{name} is missing"
        if size < nbytes or (size > nbytes and name in exact):
            return f"{name} has {size:,} bytes instead of {nbytes:,}"
    return ""
