"""Reading a checkpoint that may be damaged: what is wrong in one place is taken from another.

Owns the order of the sources, the search for one that has the right bytes, and the record of what was used.
Whatever a source gives is checked against the digests of the save before it is taken. As long as nothing is
wrong no source is opened, and no rank waits for another. Files stay as they are: changing them is `repair`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    StorageError,
    truncated_list,
)
from megackpt.formats.contents import Chunks, Contents, Part, RawRanges
from megackpt.formats.damage import damage_of
from megackpt.metadata import ChunkTable
from megackpt.notices import notice
from megackpt.storage import Store, as_store, open_store
from megackpt.validation import PARITY, RecoveredBytes, merge_recovered

log = logging.getLogger(__name__)

DAMAGE = (IntegrityError, FormatError, StorageError, NotACheckpointError)
"""What stored bytes can be that a source may have right: changed, malformed, unreadable, gone."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A place that may have what another has lost.

    Attributes:
        name: what to call it.
        contents: what was opened there; of the same save.
    """

    name: str
    contents: Contents


class Fallback:
    """One rank's way to a checkpoint that may be damaged, and to what can take its place. Local.

    Sources, in their order: parity, then each copy, and the parity of that. Reading is safe for many threads.

    store is where the checkpoint belongs; copies are places, or open stores, that may hold the same save;
    opens is how any of them is opened. Where it is not allowed, damage is an error as ever.

    Attributes:
        location: where the checkpoint belongs.
    """

    def __init__(
        self,
        store: Store,
        copies: Sequence[Any],
        opens: Callable[[Store], Contents],
        *,
        is_allowed: bool = True,
    ) -> None:
        self.location = store.location
        self._is_allowed = is_allowed
        self._store = store
        self._copies = tuple(copies)
        self._open = opens
        self._primary: Contents  # what is read first; since `open`
        self._opened = contextlib.ExitStack()
        self._lock = threading.RLock()
        self._sources: tuple[_Source, ...] | None = None
        self._refusals: list[str] = []  # why sources cannot be used
        self._recovered: list[RecoveredBytes] = []

    def __enter__(self) -> Fallback:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def only_store(self) -> Store | None:
        """Where all bytes come from; None if what is damaged may come from elsewhere."""
        return None if self._is_allowed else self._store

    @property
    def recovered(self) -> tuple[RecoveredBytes, ...]:
        """What was taken from elsewhere so far."""
        with self._lock:
            return merge_recovered(self._recovered)

    def open(self) -> Contents:
        """Open the checkpoint, or else a copy; damaged bytes of what is opened come from other sources.

        Raises:
            CheckpointError: neither it nor a copy can be opened; the text names all that were tried.
        """
        if not self._is_allowed:
            return self._open(self._store)
        try:
            self._primary = self._open(self._store)
        except DAMAGE as error:
            if not self._copies:
                raise
            self._primary = self._open_copy(error)
        primary = self._primary
        return replace(
            primary,
            chunks=lambda keys: self._chunks(_of_keys(keys)),
            chunks_overlapping=lambda wanted: self._chunks(lambda contents: contents.chunks_for(wanted)),
            common=lambda: self._first(lambda contents: contents.common()),
            rebuilt=None,
        )

    def sources(self) -> tuple[_Source, ...]:
        """Return what besides the checkpoint itself is there, opened by the first call."""
        with self._lock:
            if self._sources is None:
                self._sources = tuple(self._find_sources())
            return self._sources

    def note(self, recovered: RecoveredBytes) -> None:
        """Keep that something was taken from elsewhere."""
        with self._lock:
            self._recovered.append(recovered)

    def lost(self, error: CheckpointError, refusals: Sequence[str]) -> CheckpointError:
        """Return an error that also says what was tried in vain."""
        with self._lock:
            tried = [*refusals, *self._refusals]
        if not tried:
            tried = ["the checkpoint was saved without parity, and no copies were given (LoadOptions.copies)"]
        lines = truncated_list([" ".join(line.split()) for line in tried])
        text = f"{error}\nNothing could take its place:\n{lines}"
        return type(error)(text, key=error.key, rank=error.rank, path=error.path)

    def _open_copy(self, error: CheckpointError) -> Contents:
        """Open the first copy that can be, as the checkpoint itself cannot."""
        for number, copy in enumerate(self._copies):
            try:
                store = self._store_of(copy)
                contents = self._open(store)
            except CheckpointError as refusal:
                self._refusals.append(f"{_name_of(copy)}: {refusal}")
                continue
            if not _may_be_of_one_save(self._store, store):
                self._refusals.append(f"{_name_of(copy)} holds another save")
                continue
            said = damage_of(error, location=self.location)
            notice(log, f"{said.file} cannot be opened, and {store.location} takes its place: {said.what}")
            self.note(RecoveredBytes(source=store.location, why=said.what, file=said.file))
            self._copies = self._copies[number + 1 :]
            return contents
        raise self.lost(error, []) from error

    def _store_of(self, copy: Any) -> Store:
        if not isinstance(copy, (str, os.PathLike)):
            return as_store(copy)
        return self._opened.enter_context(contextlib.closing(open_store(copy)))

    def _find_sources(self) -> Iterator[_Source]:
        yield from self._rebuilt(PARITY, self._primary)
        for copy in self._copies:
            name = _name_of(copy)
            try:
                contents = self._open(self._store_of(copy))
            except CheckpointError as refusal:
                self._refusals.append(f"{name}: {refusal}")
                continue
            if contents.identity != self._primary.identity:
                self._refusals.append(f"{name} holds another save")
                continue
            if not contents.names_save:  # values of another step would have the same places
                self._refusals.append(f"{name}: nothing in its format says whether it is of the same save")
                continue
            yield _Source(name, contents)
            yield from self._rebuilt(f"{PARITY} of {name}", contents)

    def _rebuilt(self, name: str, contents: Contents) -> Iterator[_Source]:
        if contents.rebuilt is None:
            return
        try:
            yield _Source(name, contents.rebuilt())
        except CheckpointError as refusal:
            self._refusals.append(f"{name}: {refusal}")

    def _first(self, get: Callable[[Contents], Any]) -> Any:
        """Return what the checkpoint gives, or the first source that gives it."""
        try:
            return get(self._primary)
        except DAMAGE as error:
            refusals = []
            for source in self.sources():
                try:
                    found = get(source.contents)
                except CheckpointError as refusal:
                    refusals.append(f"{source.name}: {refusal}")
                    continue
                said = damage_of(error, location=self.location)
                self.note(RecoveredBytes(source=source.name, why=said.what, file=said.file))
                return found
            raise self.lost(error, refusals) from error

    def _chunks(self, get: Callable[[Contents], Chunks]) -> Chunks:
        return ChunksWithFallback(self._first(get), get, self)


class ChunksWithFallback(Chunks):
    """Chunks whose damaged blocks are read from another source. Safe for many threads.

    It has no `file_ranges`: whether files are whole is found out, block by block, when they are read.
    """

    def __init__(self, chunks: Chunks, get: Callable[[Contents], Chunks], fallback: Fallback) -> None:
        self._chunks, self._get, self._fallback = chunks, get, fallback
        self._others: list[tuple[str, Chunks]] | None = None
        self._refusals: list[str] = []
        self._lock = threading.Lock()
        self.table, self.block_bytes, self.position = chunks.table, chunks.block_bytes, chunks.position
        self._raw = chunks.raw_ranges()

    def describe(self, row: int) -> str:
        """Return where the bytes of a chunk lie in the checkpoint itself."""
        return self._chunks.describe(row)

    def raw_ranges(self) -> RawRanges | None:
        """Return where uncompressed chunks lie in the checkpoint itself."""
        return None if self._raw is None else replace(self._raw, borrow=self._borrow)

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out; see `Chunks`. What is damaged comes from the first source that has it right."""
        try:
            self._chunks.read_into(row, start, out, verify=verify)
        except DAMAGE as error:
            self._read_blocks(row, start, out, error)

    @contextlib.contextmanager
    def _borrow(self, parts: Sequence[Part], verify: bool) -> Iterator[list[memoryview]]:
        assert self._raw is not None
        with contextlib.ExitStack() as stack:
            try:
                lent = stack.enter_context(self._raw.borrow(parts, verify))
            except DAMAGE:
                lent = [memoryview(bytearray(part.stop - part.start)) for part in parts]
                for part, out in zip(parts, lent, strict=True):
                    self.read_into(part.row, part.start, out, verify=verify)
            yield lent

    def _read_blocks(self, row: int, start: int, out: memoryview, error: CheckpointError) -> None:
        """Read block by block, so that what is whole need not be found elsewhere, too."""
        view = out.cast("B") if out.nbytes else memoryview(b"")
        step = self.block_bytes if self.block_bytes > 1 else max(len(view), 1)
        for at in range(0, len(view), step):
            block = view[at : at + step]
            if len(block) < len(view):
                try:
                    self._chunks.read_into(row, start + at, block, verify=True)
                    continue
                except DAMAGE as damage:
                    error = damage
            self._read_elsewhere(row, start + at, block, error)

    def _read_elsewhere(self, row: int, start: int, out: memoryview, error: CheckpointError) -> None:
        refusals = []
        for name, chunks in self._sources():
            try:
                chunks.read_into(row, start, out, verify=True)
            except CheckpointError as refusal:
                refusals.append(f"{name}: {refusal}")
                continue
            self._fallback.note(self._record(row, start, len(out), name, error))
            return
        raise self._fallback.lost(error, [*refusals, *self._refusals]) from error

    def _sources(self) -> list[tuple[str, Chunks]]:
        """Return the same chunks in each source that has them; a source is asked for them once."""
        with self._lock:
            if self._others is None:
                self._others = []
                for source in self._fallback.sources():
                    try:
                        chunks = self._get(source.contents)
                    except CheckpointError as refusal:
                        self._refusals.append(f"{source.name}: {refusal}")
                        continue
                    if _are_equal(chunks.table, self.table):
                        self._others.append((source.name, chunks))
                    else:
                        self._refusals.append(f"{source.name} lists other chunks")
            return self._others

    def _record(
        self, row: int, start: int, nbytes: int, source: str, error: CheckpointError
    ) -> RecoveredBytes:
        table, chunks = self.table, self._chunks
        key, box = table.arrays[int(table.array[row])].key, table.describe(row)
        why = " ".join(str(error).split())
        ranges = chunks.file_ranges()
        if ranges is None:
            return RecoveredBytes(source=source, why=why, key=key, box=box)
        file = ranges.files[int(ranges.file[row])]
        if self._raw is None:
            return RecoveredBytes(source=source, why=why, file=file, key=key, box=box)
        first = int(ranges.start[row]) + start
        return RecoveredBytes(
            source=source, why=why, file=file, key=key, box=box, start=first, stop=first + nbytes
        )


def _may_be_of_one_save(one: Store, other: Store) -> bool:
    """Say whether the commits in two stores name the same attempt, or one of them names none any more."""
    attempts = []
    for store in (one, other):
        try:
            attempts.append(read_manifest(store).get("attempt"))
        except CheckpointError:
            return True
    return None in attempts or attempts[0] == attempts[1]


def _of_keys(keys: Iterable[str]) -> Callable[[Contents], Chunks]:
    wanted = list(keys)
    return lambda contents: contents.chunks(wanted)


def _are_equal(one: ChunkTable, other: ChunkTable) -> bool:
    if one.arrays != other.arrays or len(one) != len(other):
        return False
    names = ("array", "start", "shape", "flat_start", "flat_stop", "nbytes")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def _name_of(copy: Any) -> str:
    return os.fspath(copy) if isinstance(copy, (str, os.PathLike)) else str(copy.location)
