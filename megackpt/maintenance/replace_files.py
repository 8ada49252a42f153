"""Replaces files of a committed checkpoint, so that a crash at any moment leaves it no worse.

All new files are written next to the old ones and flushed; then each takes its name by one rename, the commit
last. Each new file is right on its own, so it does not matter how many of them a crash lets through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from megackpt.errors import CheckpointError, UnsupportedError
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES
from megackpt.storage import Store
from megackpt.storage.store import is_temporary_name_of, temporary_name
from megackpt.storage.views import Patch, PatchedStore

_STEP_BYTES = 4 * 1024 * 1024


@contextlib.contextmanager
def replaced_files(store: Store, view: Store, names: Sequence[str]) -> Iterator[Store]:
    """Write files of a view of a store into the store, and replace the old ones when the block ends.

    Yields the store as it will be, read from what was written, so that the block can check it. If the block
    raises, the new files are removed and the old ones stay. A store that replaces a file when its writer is
    closed, such as an object store, needs no second copy: there the view itself is yielded, and files are
    written when the block ends.

    Raises:
        CheckpointError: a file could not be written; what was written is removed.
        UnsupportedError: the store can replace a file neither by a rename nor by a put.
    """
    if store.replaces_on_close:
        yield view
        for name in _commit_last(names):
            _copy(view, name, store, name)
        return
    if not store.moves_atomically:
        raise UnsupportedError(
            f"{store.location}: this store cannot replace a large file in one step (see `moves_atomically`). "
            f"Nothing was repaired. Repair a copy of the checkpoint in a directory.",
            path=store.location,
        )
    # A repair that crashed may have left new files.
    store.delete([n for n in store.names() if any(is_temporary_name_of(n, name) for name in names)])
    new_names = {name: temporary_name(name) for name in names}
    try:
        for name, new_name in new_names.items():
            _copy(view, name, store, new_name)
        store.sync()
        patches = {name: Patch.whole(store, new, store.size(new)) for name, new in new_names.items()}
        yield PatchedStore(store, patches)
    except Exception:
        with contextlib.suppress(CheckpointError):
            store.delete(new_names.values())
            store.sync()
        raise
    for name in _commit_last(names):
        if name == MANIFEST:
            store.sync()  # the files that the commit names are durable before the commit is
        store.move(new_names[name], name)
    store.sync()


def _commit_last(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (name == MANIFEST, name))


def _copy(source: Store, name: str, target: Store, new_name: str) -> None:
    if new_name == MANIFEST:
        target.replace(MANIFEST, source.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES))
        return
    nbytes = source.size(name)
    buffer = np.empty(min(_STEP_BYTES, nbytes), np.uint8).data
    with target.open_writer(new_name, nbytes) as writer:
        for start in range(0, nbytes, _STEP_BYTES):
            part = buffer[: min(_STEP_BYTES, nbytes - start)]
            source.read_into(name, start, part)
            writer.write(part)
