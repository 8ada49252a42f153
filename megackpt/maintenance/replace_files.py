"""Replacing files of a checkpoint that is committed, so that a crash at any moment leaves it no worse.

Owns the order of the steps: all new files beside the old ones, durably; a check of the whole; then one
rename for each, the commit last. Each new file is right on its own, so it does not matter which of them a
crash leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from megackpt.errors import CheckpointError, UnsupportedError
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES
from megackpt.storage import Store
from megackpt.storage.names import is_temporary_name_of, temporary_name
from megackpt.storage.views import Patch, PatchedStore

_STEP_BYTES = 4 * 1024 * 1024


def replace_files(store: Store, view: Store, names: Sequence[str], check: Callable[[Store], None]) -> None:
    """Put files of a view of a store into the store.

    check is given the store as it will be, read from what was written, before anything is replaced; it raises
    what keeps that from happening.

    Raises:
        CheckpointError: a file could not be written, or check raised; what was written is removed.
        UnsupportedError: the store can replace a file neither by a rename nor by a put.
    """
    if store.replaces_on_close:
        for name in _commit_last(names):
            _copy(view, name, store, name)
        return
    if not store.moves_atomically:
        raise UnsupportedError(
            f"{store.location}: this store has no way to replace a large file at once (a method `move`), so "
            f"nothing in it is repaired. Repair a copy of the checkpoint in a directory.",
            path=store.location,
        )
    store.delete(
        [n for n in store.names() if any(is_temporary_name_of(n, name) for name in names)]
    )  # of a crash
    aside = {name: temporary_name(name) for name in names}
    try:
        for name, written in aside.items():
            _copy(view, name, store, written)
        store.sync()
        check(PatchedStore(store, {n: Patch.whole(store, w, store.size(w)) for n, w in aside.items()}))
    except Exception:
        with contextlib.suppress(CheckpointError):
            store.delete(aside.values())
            store.sync()
        raise
    for name in _commit_last(names):
        if name == MANIFEST:
            store.sync()  # what it names is there for good before it is
        store.move(aside[name], name)
    store.sync()


def _commit_last(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (name == MANIFEST, name))


def _copy(source: Store, name: str, target: Store, written: str) -> None:
    if written == MANIFEST:
        target.replace(MANIFEST, source.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES))
        return
    nbytes = source.size(name)
    buffer = np.empty(min(_STEP_BYTES, nbytes), np.uint8).data
    with target.open_writer(written, nbytes) as writer:
        for start in range(0, nbytes, _STEP_BYTES):
            part = buffer[: min(_STEP_BYTES, nbytes - start)]
            source.read_into(name, start, part)
            writer.write(part)
