"""metadata.json: the commit of a checkpoint.

Owns reading and writing it. Its presence is what makes a directory a checkpoint; it is written last,
atomically, and only afterwards are the files of older attempts removed. Field names are those of
Megatron-Core's metadata.json. A directory that another library wrote may lack it and still be a checkpoint:
formats say so themselves.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets

from megackpt.errors import CheckpointError, FormatError, NotACheckpointError, StorageError
from megackpt.formats.registry import detect, save_strategies
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES, Json, SaveStrategy
from megackpt.storage import Store

_HALF_REPLACED = re.compile(rf"\.{re.escape(MANIFEST)}\.[0-9a-f]+\.tmp")  # of a replace that died


def is_committed(store: Store) -> bool:
    """Say whether there is a checkpoint of a known format."""
    return store.exists(MANIFEST) or detect(store) is not None


def read_manifest(store: Store) -> Json:
    """Return the manifest of a committed checkpoint.

    Raises:
        NotACheckpointError: there is no metadata.json, and no other sign of a known format.
        FormatError: it is not a JSON object.
    """
    if not store.exists(MANIFEST):
        detected = detect(store)
        if detected is not None:
            return detected
        raise NotACheckpointError(
            f"{store.location} is not a checkpoint: it has no {MANIFEST}. Either nothing was saved there or "
            f"the save did not "
            f"finish; name the directory of a finished one.",
            path=store.location,
        )
    try:
        manifest = json.loads(store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{store.location}/{MANIFEST}: not JSON ({error}). The file is damaged.", path=MANIFEST
        ) from error
    if not isinstance(manifest, dict):
        raise FormatError(
            f"{store.location}/{MANIFEST}: not a JSON object. The file is damaged.", path=MANIFEST
        )
    return manifest


def attempts_in(store: Store, strategy: SaveStrategy) -> frozenset[str]:
    """Return the attempts that have files in a store: the committed one, and what failed ones left."""
    return frozenset(a for a in map(strategy.attempt_of, store.names()) if a is not None)


def is_leftover(store: Store) -> bool:
    """Say whether there is no commit, and nothing but what a save of a known format has written."""
    known = [strategy.attempt_of for strategy in save_strategies()]
    ours = (_HALF_REPLACED.fullmatch(n) or any(attempt_of(n) for attempt_of in known) for n in store.names())
    return not store.exists(MANIFEST) and all(ours)


def commit(
    store: Store, said: Json, *, attempt: str, earlier: frozenset[str], strategy: SaveStrategy
) -> None:
    """Make an attempt the checkpoint, all at once, then remove what earlier attempts left.

    said is what the strategy told of its files. Every file of the attempt must be durable before. earlier
    are the attempts that had files when this save began; any other belongs to a save that began later.
    Rank 0 only.

    Raises:
        StorageError: files of this attempt are gone, as when another job has saved to the same place
            meanwhile.
    """
    if not set(strategy.files_of(said)) <= set(store.names()):
        raise StorageError(
            f"{store.location}: files that this save has written are gone. Another job saves to the same "
            f"directory, "
            f"or something cleans it up; give each its own.",
            path=store.location,
        )
    manifest = strategy.publish(store, attempt=attempt, said=said)
    store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    # From here on the save has succeeded. What cannot be removed now is removed by the next save.
    with contextlib.suppress(StorageError):
        names = store.names()
        stale = [n for n in names if strategy.attempt_of(n) in earlier - {attempt}]
        stale += [n for n in names if _HALF_REPLACED.fullmatch(n)]
        store.delete(stale)
        store.sync()


def remove_arrays(store: Store, *, key_prefix: str, strategy: SaveStrategy) -> None:
    """Take arrays out of a committed checkpoint, all at once; then remove the files that only they needed."""
    said, stale = strategy.remove_arrays(store, read_manifest(store), key_prefix=key_prefix)
    store.sync()
    store.replace(MANIFEST, json.dumps(said, indent=1, sort_keys=True).encode())
    with contextlib.suppress(StorageError):
        store.delete(stale)
        store.sync()


def discard(store: Store, *, attempt: str, strategy: SaveStrategy) -> None:
    """Remove what a failed attempt has written, as far as that is possible.

    An attempt can fail after its commit, when a rank is lost at the last meeting: then it stays, as it is
    the only checkpoint there is.
    """
    with contextlib.suppress(CheckpointError):
        if strategy.committed_attempt(store) == attempt:
            return
        store.delete([n for n in store.names() if strategy.attempt_of(n) == attempt])
        store.sync()


def withdraw(store: Store, *, attempt: str, strategy: SaveStrategy) -> None:
    """Take a committed attempt back, as far as that is possible: the commit first, then its files.

    For one that turns out to be damaged. What it replaced is gone already. Rank 0 only.
    """
    with contextlib.suppress(CheckpointError):
        fixed: list[str] = []
        if strategy.committed_attempt(store) == attempt:
            fixed = strategy.files_of(read_manifest(store))
            store.delete([MANIFEST])
            store.sync()
        store.delete([*fixed, *(n for n in store.names() if strategy.attempt_of(n) == attempt)])
        store.sync()


def new_attempt() -> str:
    """Return a fresh attempt id, 16 hex digits: it stands in the name of every file the attempt writes."""
    return secrets.token_hex(8)
