"""Publishes an attempt of version 1: its files, whose names are fixed, replace those of the last checkpoint.

The old commit is removed first, then the files are replaced. A marker with the attempt in its name lists the
files of our saves, so that a later save recognises the files of a save that was killed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set

from megackpt.errors import CheckpointError, FormatError, StorageError, truncated_list
from megackpt.formats.documents import read_manifest_file
from megackpt.formats.file_names import ZARR_V1
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES
from megackpt.formats.zarr import names
from megackpt.formats.zarr.array_documents import V2_ATTRIBUTES, V2_FILE
from megackpt.formats.zarr.load import check_listed, parse_files
from megackpt.storage import Store

MARKER_MAX_BYTES = 2**30
_BACKUP = ".before/"  # in the staging directory, where no key has this name


def is_committed(store: Store) -> bool:
    """Return whether metadata.json names this format; False if there is none.

    Raises:
        FormatError: it is not a JSON object.
    """
    manifest = read_manifest_file(store) or {}
    return (manifest.get("sharded_backend"), manifest.get("sharded_backend_version")) == (names.BACKEND, 1)


def owned_files(store: Store, listed: Iterable[str]) -> set[str]:
    """Return the files of the checkpoint in a store, or of one that was partly replaced; no other files.

    Raises:
        StorageError: there are arrays of neither, or a checkpoint of another format is in the way.
    """
    files = set(listed)
    marked = _marked(store, files)
    manifest = read_manifest_file(store)
    if manifest is None:
        _check_no_strange_arrays(store, arrays_in(files) - marked)
        return marked & files
    if not is_committed(store):
        # Even if a marker of ours names common.pt, another format may have written its own there since.
        if names.COMMON in files and (manifest.get("common_backend") == "torch" or not marked):
            raise StorageError(
                f"{store.location} holds a checkpoint of another format, with a file {names.COMMON!r} of its "
                f"own, so there would be a moment with files of both. Remove it, or save to another "
                f"directory.",
                path=store.location,
            )
        return marked & files
    paths = [name.removesuffix(V2_FILE) for name in arrays_in(files)]
    return {name for name in files if _is_part(name, set(paths))} | (marked & files)


def _check_no_strange_arrays(store: Store, arrays: Set[str]) -> None:
    if arrays:
        raise StorageError(
            f"{store.location} holds zarr arrays without a checkpoint, which megackpt has not written:\n"
            f"{truncated_list(sorted(arrays))}\nThey may be left of a save by another program. Remove them, "
            f"or save to another directory.",
            path=store.location,
        )


def arrays_in(listed: Iterable[str]) -> set[str]:
    """Return the documents of published arrays."""
    return {n for n in listed if n.endswith(f"/{V2_FILE}") and not n.startswith(names.STAGING)}


def _is_part(name: str, paths: set[str]) -> bool:
    """Return whether a file belongs to a committed checkpoint of version 1."""
    if name.startswith(names.STAGING):
        return False
    _, slash, leaf = name.rpartition("/")
    if not slash:
        return name == names.COMMON
    if names.parse_shard(leaf) is not None and leaf.endswith(".pt"):
        return True
    # With the separator '/', chunks are in directories with numbers as names.
    parts = name.split("/")
    above = next((n for n in range(1, len(parts)) if "/".join(parts[:n]) + "/" in paths), None)
    if above is None:
        return False
    rest = parts[above:]
    return rest in ([V2_FILE], [V2_ATTRIBUTES]) or all(names.is_chunk(part) for part in rest)


def marked_files(store: Store, listed: Iterable[str]) -> list[str]:
    """Return the existing files that markers name, then the markers.

    A marker that cannot be read counts as empty.
    """
    files = set(listed)
    markers = sorted(n for n in files if names.attempt_of_marker(n) is not None)
    marked: set[str] = set()
    for name in markers:
        with contextlib.suppress(FormatError):
            marked |= _marked(store, {name})
    return [*sorted(marked & files), *markers]


def _marked(store: Store, listed: set[str]) -> set[str]:
    """Return the files that markers name."""
    marked: set[str] = set()
    for name in sorted(listed):
        if names.attempt_of_marker(name) is None:
            continue
        try:
            named = json.loads(store.read(name, max_bytes=MARKER_MAX_BYTES))["files"]
            marked.update(str(file) for file in named)
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise FormatError(
                f"{store.location}/{name}: not a list of files ({error}). A save that did not finish has "
                f"left it: remove the directory, or save to another one.",
                path=name,
            ) from error
    # A forged marker must not make a save delete the commit, or the files of another attempt.
    return {n for n in marked if n != MANIFEST and not n.startswith(names.STAGING)}


def publish_files(store: Store, *, attempt: str) -> None:
    """Replace the checkpoint in a store by the staged files of an attempt, without a commit. Rank 0 only.

    The old commit is removed first, since arrays have fixed names: a crash after that leaves no checkpoint,
    but never a mixture. After an error, the old checkpoint is restored if the store can move files. All
    staged files are durable before.

    Raises:
        StorageError: a file of no checkpoint is in the way. Nothing was changed.
    """
    listed = set(store.names())
    staging = names.staged(attempt)
    target_of = {name: name.removeprefix(staging) for name in sorted(listed) if name.startswith(staging)}
    owned = owned_files(store, listed)
    _check_no_foreign_files(store, listed - owned, target_of)
    markers = [n for n in listed if names.attempt_of_marker(n) is not None]
    # Up to here nothing has changed. The marker lists old and new files before the first one moves: whatever
    # a crash leaves then, a later save knows which files are ours.
    put_marker(store, attempt, owned=owned, checkpoint=target_of.values())
    manifest = store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES) if is_committed(store) else None
    moved: list[tuple[str, str]] = []  # from, to; in this order
    try:
        if manifest is not None:
            store.delete([MANIFEST])
        # Durable before the first move, or a crash could bring the old commit back over new files.
        store.sync()
        if store.moves_atomically:
            # Old files are kept until all new ones are in place, so that an error can be undone.
            backup = {name: f"{staging}{_BACKUP}{name}" for name in sorted(owned)}
            _move_all(store, {**backup, **target_of}, moved)
        else:
            # Moves are copies here, so there is no backup; files without a successor go first.
            store.delete(sorted(owned - set(target_of.values())))
            _move_all(store, target_of, moved)
    except Exception:
        with contextlib.suppress(CheckpointError):
            if manifest is not None and store.moves_atomically:
                _put_back(store, moved, manifest, marker=names.marker(attempt))
            elif store.exists(MANIFEST):  # of the old checkpoint, to which the new marker does not belong
                store.delete([names.marker(attempt)])
        raise
    # The new files are in place: the backups go.
    store.delete([to for _, to in moved if to.startswith(staging)])
    # Last: until all files are in place, only the old markers may name some of them.
    store.delete(markers)
    store.sync()
    remove_empty_directories(store, names.STAGING)


def put_marker(store: Store, attempt: str, *, owned: Iterable[str], checkpoint: Iterable[str]) -> None:
    """Write atomically which files are of our saves, and which of these make up the checkpoint."""
    files = {"files": sorted({*owned, *checkpoint}), "checkpoint": sorted(checkpoint)}
    store.replace(names.marker(attempt), json.dumps(files).encode())


def check_marked(store: Store, listed: Sequence[str]) -> None:
    """Check that no document of an array, and no object, is missing in a checkpoint of ours.

    The marker of an attempt that is not published yet is ignored. Checkpoints of others have no marker, and
    cannot be checked.

    Raises:
        FormatError: a file is missing, or the marker is damaged.
    """
    waiting = {ZARR_V1.attempt_of(name) for name in listed}
    for name in listed:
        attempt = names.attempt_of_marker(name)
        if attempt is None or attempt in waiting:
            continue
        where = f"{store.location}/{name}"
        files = parse_files(store.read(name, max_bytes=MARKER_MAX_BYTES), "checkpoint", where=where)
        files = [n for n in files if n != names.COMMON]  # its reader reports it
        check_listed(files, listed, location=store.location, list_name=where, key_of=str)


def _move_all(store: Store, target_of: Mapping[str, str], moved: list[tuple[str, str]]) -> None:
    for name, target in target_of.items():
        store.move(name, target)
        moved.append((name, target))


def _put_back(store: Store, moved: list[tuple[str, str]], manifest: bytes, *, marker: str) -> None:
    """Undo the moves, and commit the old checkpoint again only when all its files are in place."""
    for name, target in reversed(moved):
        store.move(target, name)
    store.sync()
    store.delete([marker])
    store.replace(MANIFEST, manifest)


def _check_no_foreign_files(store: Store, foreign: set[str], target_of: Mapping[str, str]) -> None:
    """Check that no file of others has the name of a file to be saved, or of a directory above one.

    Raises:
        StorageError: there is one.
    """
    targets = set(target_of.values())
    # A file where a directory is needed, or a directory where a file is, would stop the moves half-way.
    in_the_way = sorted((targets | _directories_above(targets)) & foreign)
    in_the_way += sorted(targets & _directories_above(foreign))
    if in_the_way:
        raise StorageError(
            f"{store.location}: these files are no part of a checkpoint and have the names of files to be "
            f"saved:\n"
            f"{truncated_list(in_the_way)}\nMove them away, or save to another directory.",
            path=store.location,
        )


def _directories_above(files: Iterable[str]) -> set[str]:
    directories: set[str] = set()
    for name in files:
        above = name.rpartition("/")[0]
        while above and above not in directories:
            directories.add(above)
            above = above.rpartition("/")[0]
    return directories


def remove_empty_directories(store: Store, prefix: str) -> None:
    """Remove empty directories, in stores that have directories. What cannot be removed stays."""
    with contextlib.suppress(CheckpointError):
        store.remove_empty_directories(prefix)
