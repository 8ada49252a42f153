"""`megackpt.repair`: replace damaged files of a checkpoint, from parity files or from copies.

`repair_search` finds which files can be repaired, and from which source. This module replaces them, so that a
crash at any moment does no harm: all new files are written next to the old ones and flushed. Then each is
renamed over the old one, the commit last. Each new file is right on its own, so after a crash any number of
them may have been renamed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np

from megackpt.engine.data.progress import Progress
from megackpt.errors import CheckpointError, DeclarationError, IntegrityError, UnsupportedError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES
from megackpt.ground.arguments import check_flags
from megackpt.options import VerifyOptions
from megackpt.storage import Location, Store, opened_store
from megackpt.storage.store import is_temporary_name_of, temporary_name
from megackpt.storage.views import Patch, PatchedStore
from megackpt.whole.arguments import checked_progress
from megackpt.whole.repair_search import RepairedFile, RepairSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The result of `megackpt.repair`.

    Attributes:
        location: the checkpoint.
        damages: all damage that was found at first.
        files: the files that were replaced, or can be replaced.
        remaining: the damage that is left after the replacement of these files.
        unusable_sources: why a copy, or parity, could not be used.
        is_applied: whether files were replaced. False: nothing was changed.
    """

    location: str
    damages: tuple[Damage, ...]
    files: tuple[RepairedFile, ...] = ()
    remaining: tuple[Damage, ...] = ()
    unusable_sources: tuple[str, ...] = ()
    is_applied: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint is whole now, or would be if `files` were replaced."""
        return not self.remaining


def repair(
    checkpoint_dir: Location,
    copies: Sequence[Location] = (),
    *,
    dry_run: bool = False,
    partial: bool = False,
    threads: int = 4,
    allow_unsafe_pickle: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Replace damaged and lost files of a checkpoint with bytes from parity files and copies. Local.

    Every byte of the checkpoint is verified three times: as it is; as it would be after the repair, before
    anything is replaced; and afterwards. Each new file is written next to the old one, and then replaces it
    in one step, `metadata.json` last. After a crash each file is the old one or the new one, and every new
    one is right. Call it in one process, and not while a job saves to the same directory.

    Args:
        checkpoint_dir: a path, a URL or an open store of one checkpoint (not the root of a run).
        copies: paths, URLs or open stores with copies of the same save; they are tried in this order,
            after parity files.
        dry_run: find out what can be repaired, and change nothing.
        partial: repair some damage even if other damage is left. Otherwise nothing is changed
            unless all damage can be repaired.
        threads: number of concurrent reads; each has a buffer of 4 MiB.
        allow_unsafe_pickle: as in `megackpt.verify`.
        progress: as in `megackpt.verify`.

    Returns:
        A report of the damage, the replaced files and the remaining damage.

    Raises:
        NotACheckpointError: there is no readable commit, and no copy of the same save has one.
        FormatError: the checkpoint has an unknown format.
        UnsupportedError: the store cannot replace a file in one step.
        StorageError: a file could not be written. New files next to the old ones are removed.
        DeclarationError: an argument is invalid.

    >>> repair("run/iter_0000100", ["backup/iter_0000100"]).is_whole  # doctest: +SKIP
    True
    """
    check_flags(dry_run=dry_run, partial=partial)
    if isinstance(copies, (str, bytes)) or not isinstance(copies, Sequence):
        raise DeclarationError(f"copies is {copies!r}; give a sequence of paths, URLs or open stores.")
    options = VerifyOptions(deep=True, threads=threads, allow_unsafe_pickle=allow_unsafe_pickle)
    progress = checked_progress(progress)
    with ExitStack() as stack:
        store, *sources = [
            stack.enter_context(opened_store(location)) for location in (checkpoint_dir, *copies)
        ]
        search = RepairSearch(store, sources, options, progress)
        return _repair(store, search, progress, may_write=not dry_run, partial=partial)


def _repair(
    store: Store, search: RepairSearch, progress: Progress, *, may_write: bool, partial: bool
) -> RepairReport:
    first = search.begin()
    if not first.damages:
        return RepairReport(location=store.location, damages=())
    last = search.repair(first)
    names = list(dict.fromkeys(file.file for file in last.files))
    remaining = last.damages
    is_applied = may_write and bool(names) and (partial or not remaining)
    if is_applied:
        with _replaced_files(store, last.view, names, progress) as written:
            if written is not last.view:
                _check_written(search.verify(written), remaining, store)
        remaining = search.verify(store)
    return RepairReport(
        location=store.location,
        damages=first.damages,
        files=last.files,
        remaining=remaining,
        unusable_sources=tuple(dict.fromkeys(search.unusable_sources)),
        is_applied=is_applied,
    )


def _check_written(damages: Sequence[Damage], expected: Sequence[Damage], store: Store) -> None:
    """Check that the new files have no damage but that of files which cannot be repaired."""
    unrepaired = {damage.file for damage in expected}
    unexpected = [damage for damage in damages if damage.file not in unrepaired]
    if unexpected:
        raise IntegrityError(
            f"The new files cannot be read back as they were written: {unexpected[0]}. Nothing was replaced; "
            f"suspect the storage.",
            path=store.location,
        )


_STEP_BYTES = 4 * 1024 * 1024


def _replaced_files(
    store: Store, view: Store, names: Sequence[str], progress: Progress
) -> AbstractContextManager[Store]:
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
        return _put_files(store, view, names, progress)
    if not store.moves_atomically:
        raise UnsupportedError(
            f"{store.location}: this store cannot replace a large file in one step (see `moves_atomically`). "
            f"Nothing was repaired. Repair a copy of the checkpoint in a directory.",
            path=store.location,
        )
    return _renamed_files(store, view, names, progress)


@contextlib.contextmanager
def _put_files(store: Store, view: Store, names: Sequence[str], progress: Progress) -> Iterator[Store]:
    yield view
    progress.begin("writing", sum(map(view.size, names)))
    for name in _commit_last(names):
        _copy(view, name, store, name, progress)


@contextlib.contextmanager
def _renamed_files(store: Store, view: Store, names: Sequence[str], progress: Progress) -> Iterator[Store]:
    # A repair that crashed may have left new files.
    store.delete([n for n in store.names() if any(is_temporary_name_of(n, name) for name in names)])
    new_names = {name: temporary_name(name) for name in names}
    progress.begin("writing", sum(map(view.size, names)))
    try:
        for name, new_name in new_names.items():
            _copy(view, name, store, new_name, progress)
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


def _copy(source: Store, name: str, target: Store, new_name: str, progress: Progress) -> None:
    if new_name == MANIFEST:
        manifest = source.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
        target.replace(MANIFEST, manifest)
        progress.advance(len(manifest))
        return
    nbytes = source.size(name)
    buffer = np.empty(min(_STEP_BYTES, nbytes), np.uint8).data
    with target.open_writer(new_name, nbytes) as writer:
        for start in range(0, nbytes, _STEP_BYTES):
            part = buffer[: min(_STEP_BYTES, nbytes - start)]
            source.read_into(name, start, part)
            writer.write(part)
            progress.advance(len(part))
