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
from dataclasses import dataclass

from megackpt.errors import CheckpointError, FormatError, NotACheckpointError, StorageError
from megackpt.formats.documents import read_manifest_file
from megackpt.formats.registry import attempt_of, detect, fixed_names
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.storage import Store
from megackpt.storage.names import is_temporary_name

_ATTEMPT = re.compile(r"[0-9a-f]{16}")


def is_committed(store: Store) -> bool:
    """Say whether there is a checkpoint of a known format."""
    return store.exists(MANIFEST) or detect(store) is not None


def read_manifest(store: Store) -> Json:
    """Return the manifest of a committed checkpoint.

    Raises:
        NotACheckpointError: there is no metadata.json, and no other sign of a known format.
        FormatError: it is not a JSON object.
    """
    found = read_manifest_file(store)
    found = detect(store) if found is None else found
    if found is None:
        raise NotACheckpointError(
            f"{store.location} is not a checkpoint: it has no {MANIFEST}. Either nothing was saved there or "
            f"the save did not "
            f"finish; name the directory of a finished one.",
            path=store.location,
        )
    return found


@dataclass(frozen=True, slots=True)
class LeftoverFiles:
    """What was at a place when a save began.

    Attributes:
        attempts: attempts of any known format that had files: the committed one, and what failed ones left.
        fixed: files of other formats' saves whose names carry no attempt, in the order in which they are
            to be removed; see `SaveStrategy.fixed_names`.
    """

    attempts: frozenset[str] = frozenset()
    fixed: tuple[str, ...] = ()


def find_leftover_files(store: Store, strategy: SaveStrategy) -> LeftoverFiles:
    """Return what earlier saves of ours have left in a store, before one with a strategy begins.

    Files of the same format whose names carry no attempt are not listed: that format replaces them itself.
    """
    names = store.names()
    if not names:
        return LeftoverFiles()
    attempts = frozenset(a for name in names if (a := _attempt_of(name, strategy)) is not None)
    own = (strategy.backend, strategy.version)
    return LeftoverFiles(attempts, tuple(fixed_names(store, names, without=own)))


def is_leftover(store: Store) -> bool:
    """Say whether there is no commit, and nothing but what a save of a known format has written."""
    return not store.exists(MANIFEST) and set(store.names()) <= set(files_of_saves(store))


def files_of_saves(store: Store) -> list[str]:
    """Return the files, without metadata.json, that saves of known formats have written; none of others.

    If they are removed in this order, and that stops anywhere, what remains is still recognised.
    """
    names = store.names()
    fixed = fixed_names(store, names)
    others = set(names) - set(fixed)
    halves = [n for n in names if is_temporary_name(n)]
    return [*halves, *fixed, *sorted(n for n in others if _attempt_of(n) is not None)]


def holds_other_attempts(store: Store) -> bool:
    """Say whether there are files of an attempt that is not committed: of a save that failed, or goes on."""
    said: Json = {}
    with contextlib.suppress(FormatError):
        said = read_manifest_file(store) or {}
    attempts = {attempt for name in store.names() if (attempt := _attempt_of(name)) is not None}
    return bool(attempts - {said.get("attempt")})


def _attempt_of(name: str, strategy: SaveStrategy | None = None) -> str | None:
    """Return the attempt in a file name of any registered format, or of a strategy; None if there is none."""
    attempt = attempt_of(name)
    if attempt is None and strategy is not None:
        attempt = strategy.file_names.attempt_of(name)
    return attempt if attempt is not None and _ATTEMPT.fullmatch(attempt) else None


def commit(store: Store, said: Json, *, attempt: str, earlier: LeftoverFiles, strategy: SaveStrategy) -> None:
    """Make an attempt the checkpoint, all at once, then remove what earlier attempts of any format left.

    said is what the strategy told of its files. Every file of the attempt must be durable before. earlier is
    what was there when this save began; anything else belongs to a save that began later, or to others.
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
    manifest = strategy.publish(store, attempt=attempt, entries=said)
    store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    # From here on the save has succeeded. What cannot be removed now is removed by the next save.
    with contextlib.suppress(CheckpointError):
        store.delete(_stale(store, attempt=attempt, earlier=earlier, strategy=strategy))
        store.sync()


def _stale(store: Store, *, attempt: str, earlier: LeftoverFiles, strategy: SaveStrategy) -> list[str]:
    """Return what a commit has made useless: fixed names first, see `SaveStrategy.fixed_names`."""
    names = dict.fromkeys(store.names())
    stale = [n for n in names if is_temporary_name(n)]
    if there := [n for n in earlier.fixed if n in names]:
        # The new checkpoint may have a file of its own under the same name.
        own = set(strategy.fixed_names(store))
        stale += [n for n in there if n not in own]
    if gone := earlier.attempts - {attempt}:
        stale += [n for n in names if _attempt_of(n, strategy) in gone]
    return stale


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
        store.delete([n for n in store.names() if strategy.file_names.attempt_of(n) == attempt])
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
        store.delete([*fixed, *(n for n in store.names() if strategy.file_names.attempt_of(n) == attempt)])
        store.sync()


def new_attempt() -> str:
    """Return a fresh attempt id, 16 hex digits: it stands in the name of every file the attempt writes."""
    return secrets.token_hex(8)
