"""Removal of what a store has: files that saves have left, single arrays, a damaged commit."""

from __future__ import annotations

import contextlib
import json

from megackpt.engine.checkpoint.manifest import attempt_in, files_of_attempt, read_manifest
from megackpt.errors import CheckpointError, FormatError, StorageError
from megackpt.formats.documents import read_manifest_file
from megackpt.formats.registry import fixed_names
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.storage import Store
from megackpt.storage.store import is_temporary_name


def is_leftover(store: Store) -> bool:
    """Return whether a store holds no commit, and only files that a save of a known format has written."""
    return not store.exists(MANIFEST) and set(store.names()) <= set(files_of_saves(store))


def files_of_saves(store: Store) -> list[str]:
    """Return the files that saves of known formats have written, without metadata.json.

    If they are removed in this order and the removal is interrupted, the remaining files are still
    recognised.
    """
    names = store.names()
    fixed = fixed_names(store, names)
    temporary = [name for name in names if is_temporary_name(name)]
    of_attempts = sorted(name for name in set(names) - set(fixed) if attempt_in(name) is not None)
    return [*temporary, *fixed, *of_attempts]


def has_other_attempts(store: Store) -> bool:
    """Return whether a store has files of an attempt that is not committed: failed, or not finished."""
    manifest: Json = {}
    with contextlib.suppress(FormatError):
        manifest = read_manifest_file(store) or {}
    attempts = {attempt for name in store.names() if (attempt := attempt_in(name)) is not None}
    return bool(attempts - {manifest.get("attempt")})


def remove_arrays(store: Store, *, key_prefix: str, strategy: SaveStrategy) -> None:
    """Remove arrays from a committed checkpoint, atomically; then remove the files that only they needed."""
    manifest, stale = strategy.remove_arrays(store, read_manifest(store), key_prefix=key_prefix)
    store.sync()  # the new index is durable before the manifest names it
    store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    # The change is committed. Files that stay are of no checkpoint, and take room only.
    with contextlib.suppress(StorageError):
        store.delete(stale)
        store.sync()


def withdraw(store: Store, *, attempt: str, strategy: SaveStrategy) -> None:
    """Remove a committed attempt that is damaged, as far as that is possible. Rank 0 only.

    The commit is removed first, then the files. The checkpoint that the attempt replaced no longer exists.
    """
    with contextlib.suppress(CheckpointError):
        fixed: list[str] = []
        if strategy.committed_attempt(store) == attempt:
            # Read before the commit is removed, which alone names files without an attempt in their names.
            fixed = strategy.files_of(read_manifest(store))
            store.delete([MANIFEST])
            # A power failure must not bring back the commit when its files are gone.
            store.sync()
        store.delete([*fixed, *files_of_attempt(store, attempt, strategy)])
        store.sync()


def remove_saved_files(store: Store) -> None:
    """Remove the commit of a directory, then the files that saves have written.

    Files that no save wrote stay. So do the files of a format whose checkpoints have no metadata.json.
    """
    store.delete([MANIFEST])
    store.sync()  # or a power failure could bring back the commit of a step whose files are gone
    store.delete(files_of_saves(store))  # ordered so that an incomplete step is still recognised
