"""metadata.json: the commit of a checkpoint.

A directory with this file is a checkpoint. The file is written last and atomically; only then the files of
older attempts are removed. Its field names are those of Megatron-Core's metadata.json. A directory that
another library wrote may be a checkpoint without this file: the formats recognise such a directory
(`LoadStrategy.detect`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass

from megackpt.errors import CheckpointError, NotACheckpointError, StorageError
from megackpt.formats.documents import is_ours, read_manifest_file
from megackpt.formats.file_names import HUGGINGFACE_MODELS
from megackpt.formats.registry import attempt_of, detect, detect_foreign, fixed_names, recognise
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.storage import LocalStore, Store
from megackpt.storage.store import is_temporary_name

_ATTEMPT = re.compile(r"[0-9a-f]{16}")


def is_committed(store: Store) -> bool:
    """Return whether a store has a checkpoint of a known format."""
    return store.exists(MANIFEST) or detect(store) is not None


def read_manifest(store: Store) -> Json:
    """Return the manifest of a committed checkpoint.

    Raises:
        NotACheckpointError: there is no metadata.json, and no format recognises the files.
        FormatError: metadata.json is not a JSON object.
    """
    is_file = isinstance(store, LocalStore) and os.path.isfile(store.location)  # perhaps of torch.save
    manifest = detect_foreign(store) if is_file else None
    seen = recognise(store) if is_file and manifest is None else None
    if manifest is None and seen is None:
        manifest = read_manifest_file(store)
    if manifest is not None and not is_ours(manifest):
        # No other format: a damaged metadata.json of ours must not be taken for that of another program.
        other = detect(store)
        manifest = other if other is not None and other["sharded_backend"] == "huggingface" else manifest
    if manifest is None and not is_file:
        manifest = detect(store) or detect_foreign(store)
    if manifest is not None:
        return manifest
    if not is_file and _has_linked_model(store):
        raise NotACheckpointError(
            f"{store.location} is not a checkpoint: its files are symbolic links. Links are not followed, so "
            f"that a forged checkpoint cannot make a load read other files; only those of the cache of "
            f"Hugging Face are, from models--X/snapshots/REVISION to a file in its models--X/blobs. Get a "
            f"folder of regular files by `hf download REPO --local-dir DIR`, or copy this one with `cp -rL`.",
            path=store.location,
        )
    seen = seen or recognise(store)
    if seen is not None:
        raise NotACheckpointError(
            f"{store.location} is not a checkpoint that can be opened: it is {seen.name}. {seen.advice}",
            path=store.location,
        )
    raise NotACheckpointError(
        f"{store.location} is not a checkpoint: it has no {MANIFEST}. Either nothing was saved there, or "
        f"the save did not finish. Give the directory of a finished save.",
        path=store.location,
    )


def _has_linked_model(store: Store) -> bool:
    """Return whether a Hugging Face folder cannot be read because it consists of symbolic links."""
    for name in HUGGINGFACE_MODELS:
        try:
            store.exists(name)
        except StorageError as error:
            if error.errno is None:  # the system has no error; the store follows no links
                return True
            raise
    return False


@dataclass(frozen=True, slots=True)
class LeftoverFiles:
    """Files of earlier saves in a store when a save began.

    Attributes:
        attempts: attempts of any known format that had files: the committed attempt, and failed ones.
        fixed: files of other formats' saves whose names carry no attempt, in the order in which they are
            removed; see `SaveStrategy.fixed_names`.
    """

    attempts: frozenset[str] = frozenset()
    fixed: tuple[str, ...] = ()


def find_leftover_files(store: Store, strategy: SaveStrategy) -> LeftoverFiles:
    """Return the files of earlier saves, before a save with a strategy begins.

    Files of the strategy's own format whose names carry no attempt are not listed: it replaces them itself.
    """
    names = store.names()
    if not names:
        return LeftoverFiles()
    attempts = frozenset(a for name in names if (a := attempt_in(name, strategy)) is not None)
    own = (strategy.backend, strategy.version)
    return LeftoverFiles(attempts, tuple(fixed_names(store, names, without=own)))


def attempt_in(name: str, strategy: SaveStrategy | None = None) -> str | None:
    """Return the attempt in a file name of any registered format, or of a strategy; None if there is none."""
    attempt = attempt_of(name)
    if attempt is None and strategy is not None:
        attempt = strategy.file_names.attempt_of(name)
    return attempt if attempt is not None and _ATTEMPT.fullmatch(attempt) else None


def commit(
    store: Store, entries: Json, *, attempt: str, earlier: LeftoverFiles, strategy: SaveStrategy
) -> None:
    """Make an attempt the checkpoint, atomically, then remove the files of earlier attempts. Rank 0 only.

    Every file of the attempt must already be durable.

    Args:
        store: where the attempt was written.
        entries: the strategy's entries about its files.
        attempt: id of the attempt.
        earlier: files that were there when this save began. Other files belong to a save that began later, or
            to other programs, and stay.
        strategy: strategy of the save.

    Raises:
        StorageError: files of this attempt are gone, for example because another job has saved to the same
            directory meanwhile.
    """
    # The old checkpoint must not be replaced by one whose files are gone.
    if not set(strategy.files_of(entries)) <= set(store.names()):
        raise StorageError(
            f"{store.location}: files that this save has written are gone. Do all ranks see one "
            f"directory? On several nodes it must be in a file system that they share. Or another job saves "
            f"to the same directory, or something cleans it up; give each its own.",
            path=store.location,
        )
    manifest = strategy.publish(store, attempt=attempt, entries=entries)
    # The commit: atomic, and after it the old files are removed. The other order could leave no checkpoint.
    store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    # From here on the save has succeeded. If a removal fails now, the next save repeats it.
    with contextlib.suppress(CheckpointError):
        store.delete(_stale_files(store, attempt=attempt, earlier=earlier, strategy=strategy))
        store.sync()


def _stale_files(store: Store, *, attempt: str, earlier: LeftoverFiles, strategy: SaveStrategy) -> list[str]:
    """Return the files that a commit has made useless: fixed names first, see `SaveStrategy.fixed_names`."""
    names = dict.fromkeys(store.names())
    # A process that was killed before it could rename its file has left these.
    stale = [name for name in names if is_temporary_name(name)]
    if fixed := [name for name in earlier.fixed if name in names]:
        # The new checkpoint may have a file with the same name.
        own = set(strategy.fixed_names(store))
        stale += [name for name in fixed if name not in own]
    if old_attempts := earlier.attempts - {attempt}:
        stale += [name for name in names if attempt_in(name, strategy) in old_attempts]
    return stale


def discard(store: Store, *, attempt: str, strategy: SaveStrategy) -> None:
    """Remove the files of a failed attempt, as far as that is possible.

    An attempt can fail after its commit, if a rank is lost in the last collective. Then its files stay,
    since it is the only checkpoint there is.
    """
    with contextlib.suppress(CheckpointError):
        # The store is asked, since the error does not show whether the commit has happened.
        if strategy.committed_attempt(store) != attempt:
            store.delete(files_of_attempt(store, attempt, strategy))
            store.sync()


def files_of_attempt(store: Store, attempt: str, strategy: SaveStrategy) -> list[str]:
    """Return the files of an attempt of a save with this strategy."""
    return [name for name in store.names() if strategy.file_names.attempt_of(name) == attempt]


def new_attempt() -> str:
    """Return a new attempt id of 16 hex digits, which is part of the name of every file of the attempt."""
    return secrets.token_hex(8)
