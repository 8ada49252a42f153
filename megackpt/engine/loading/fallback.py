"""Loads a damaged checkpoint: damaged bytes are read from parity or from a copy of the same save.

Every byte from such a source is checked against the digests of the save. As long as nothing is damaged, no
source is opened, and no rank waits for another. A load changes no file; `megackpt.whole.repair` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    StorageError,
    truncated_list,
)
from megackpt.formats.contents import Chunks, Contents, Part, RawRanges
from megackpt.formats.damage import described_error
from megackpt.ground.notices import notice
from megackpt.options import LoadOptions
from megackpt.plans.metadata import ChunkTable
from megackpt.plans.validation import RecoveredBytes
from megackpt.plans.validation.report import PARITY, merge_recovered
from megackpt.storage import Store, as_store, open_store

log = logging.getLogger(__name__)

DAMAGE_ERRORS = (IntegrityError, FormatError, StorageError, NotACheckpointError)
"""Errors of bytes that are changed, malformed, unreadable or lost: another source may have them undamaged."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A source of bytes that the checkpoint itself has lost.

    Attributes:
        name: its name in errors and reports.
        contents: the same save, opened in that source.
    """

    name: str
    contents: Contents


class FallbackSource:
    """A checkpoint that may be damaged, and the replacements for damaged bytes. Local.

    Replacements are, in this order: parity, then each copy and the parity of that copy. Several threads may
    read at once.

    Attributes:
        location: path or URL of the checkpoint.
        contents: the opened checkpoint; its chunks and common state fall back to replacements.
        only_store: None, since bytes may come from several stores.
    """

    contents: Contents
    only_store = None

    def __init__(self, store: Store, options: LoadOptions, resources: ExitStack) -> None:
        self.location = store.location
        self._store = store
        self._copies: Sequence[Any] = options.copies
        self._allow_unsafe_pickle = options.allow_unsafe_pickle
        self._resources = resources
        self._primary: Contents
        self._lock = threading.RLock()
        self._replacements: tuple[Replacement, ...] | None = None
        self._unusable: list[str] = []  # sources that cannot be used, and why
        self._recovered: list[RecoveredBytes] = []

    @classmethod
    def open(cls, store: Store, options: LoadOptions, resources: ExitStack) -> FallbackSource:
        """Open the checkpoint, or the first copy that can be opened if the checkpoint cannot.

        Args:
            store: where the checkpoint was saved.
            options: `copies` and `allow_unsafe_pickle`.
            resources: closes the copies that are opened.

        Raises:
            CheckpointError: neither the checkpoint nor a copy can be opened; the text names all that were
                tried.
        """
        source = cls(store, options, resources)
        try:
            source._primary = source._open(store)
        except DAMAGE_ERRORS as error:
            if not source._copies:
                raise
            source._primary = source._open_copy(error)
        source.contents = replace(
            source._primary,
            chunks=lambda keys: source._chunks(_chunks_of_keys(keys)),
            chunks_overlapping=lambda wanted: source._chunks(lambda contents: contents.chunks_for(wanted)),
            common=lambda: source._first(lambda contents: contents.common()),
            rebuilt=None,
        )
        return source

    @property
    def recovered(self) -> tuple[RecoveredBytes, ...]:
        """The bytes that were read from replacements so far."""
        with self._lock:
            return merge_recovered(self._recovered)

    def replacements(self) -> tuple[Replacement, ...]:
        """Return the replacements that can be opened. The first call opens them."""
        with self._lock:
            if self._replacements is None:
                # Other threads that meet damage wait for the first one, which opens the sources for all.
                self._replacements = tuple(self._open_replacements())
            return self._replacements

    def record(self, recovered: RecoveredBytes) -> None:
        """Record that bytes were read from a replacement."""
        with self._lock:
            self._recovered.append(recovered)

    def error_of_all(self, error: CheckpointError, failures: Sequence[str]) -> CheckpointError:
        """Return the error of the checkpoint, with a list of the replacements that did not help."""
        with self._lock:
            tried = [*failures, *self._unusable]
        if not tried:
            tried = ["the checkpoint was saved without parity, and no copies were given (LoadOptions.copies)"]
        lines = truncated_list([" ".join(line.split()) for line in tried])
        text = f"{error}\nNo other source could replace it:\n{lines}"
        return type(error)(text, key=error.key, rank=error.rank, path=error.path)

    def _open(self, store: Store) -> Contents:
        return open_checkpoint(store, allow_unsafe_pickle=self._allow_unsafe_pickle)

    def _open_copy(self, error: CheckpointError) -> Contents:
        """Return the first copy that can be opened; error says why the checkpoint cannot."""
        for number, copy in enumerate(self._copies):
            try:
                store = self._store_of(copy)
                contents = self._open(store)
            except CheckpointError as failure:
                self._unusable.append(f"{_name_of(copy)}: {failure}")
                continue
            if not _may_be_same_save(self._store, store):
                self._unusable.append(f"{_name_of(copy)} holds another save")
                continue
            damage = described_error(error, location=self.location)
            notice(
                log, f"{damage.file} cannot be opened, and that of {store.location} is used: {damage.what}"
            )
            self.record(RecoveredBytes(source=store.location, why=damage.what, file=damage.file))
            self._copies = self._copies[number + 1 :]  # only later copies remain as replacements
            return contents
        raise self.error_of_all(error, []) from error

    def _store_of(self, copy: Any) -> Store:
        if not isinstance(copy, (str, os.PathLike)):
            return as_store(copy)
        return self._resources.enter_context(contextlib.closing(open_store(copy)))

    def _open_replacements(self) -> Iterator[Replacement]:
        yield from self._open_parity(PARITY, self._primary)
        for copy in self._copies:
            name = _name_of(copy)
            try:
                contents = self._open(self._store_of(copy))
            except CheckpointError as failure:
                self._unusable.append(f"{name}: {failure}")
                continue
            if contents.identity != self._primary.identity:
                # Its bytes match digests of their own, so that no later check would reject them.
                self._unusable.append(f"{name} holds another save")
                continue
            if not contents.names_save:  # values of another step could lie at the same positions
                self._unusable.append(f"{name}: nothing in its format says whether it is of the same save")
                continue
            yield Replacement(name, contents)
            yield from self._open_parity(f"{PARITY} of {name}", contents)

    def _open_parity(self, name: str, contents: Contents) -> Iterator[Replacement]:
        if contents.rebuilt is None:
            return
        try:
            yield Replacement(name, contents.rebuilt())
        except CheckpointError as failure:
            self._unusable.append(f"{name}: {failure}")

    def _first(self, get: Callable[[Contents], Any]) -> Any:
        """Return the result from the checkpoint, or from the first replacement that has it."""
        try:
            return get(self._primary)
        except DAMAGE_ERRORS as error:
            failures = []
            for replacement in self.replacements():
                try:
                    value = get(replacement.contents)
                except CheckpointError as failure:
                    failures.append(f"{replacement.name}: {failure}")
                    continue
                damage = described_error(error, location=self.location)
                self.record(RecoveredBytes(source=replacement.name, why=damage.what, file=damage.file))
                return value
            raise self.error_of_all(error, failures) from error

    def _chunks(self, get: Callable[[Contents], Chunks]) -> Chunks:
        return ChunksWithFallback(self._first(get), get, self)


class ChunksWithFallback(Chunks):
    """Chunks with damaged blocks that are read from a replacement. Several threads may read at once.

    It has no `file_ranges`: reading finds out, block by block, whether files are undamaged.

    Args:
        chunks: the chunks of the checkpoint.
        get: returns the same chunks of a replacement.
        source: has the replacements, and records the bytes read from them.
    """

    def __init__(self, chunks: Chunks, get: Callable[[Contents], Chunks], source: FallbackSource) -> None:
        self._chunks, self._get, self._source = chunks, get, source
        self._replacements: list[tuple[str, Chunks]] | None = None
        self._unusable: list[str] = []
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
        """Fill out; see `Chunks`. Damaged blocks come from the first replacement that has them undamaged."""
        try:
            self._chunks.read_into(row, start, out, verify=verify)
        except DAMAGE_ERRORS as error:
            self._read_blocks(row, start, out, error)

    @contextlib.contextmanager
    def _borrow(self, parts: Sequence[Part], verify: bool) -> Iterator[list[memoryview]]:
        assert self._raw is not None
        with contextlib.ExitStack() as stack:
            try:
                buffers = stack.enter_context(self._raw.borrow(parts, verify))
            except DAMAGE_ERRORS:
                buffers = [memoryview(bytearray(part.stop - part.start)) for part in parts]
                # Part by part: only the damaged ones come from a replacement.
                for part, out in zip(parts, buffers, strict=True):
                    self.read_into(part.row, part.start, out, verify=verify)
            # Outside of the try block: an error of the caller is no damage of these bytes.
            yield buffers

    def _read_blocks(self, row: int, start: int, out: memoryview, error: CheckpointError) -> None:
        """Read block by block, so that only damaged blocks have to be found elsewhere."""
        # A memoryview whose shape has a 0 cannot be cast.
        view = out.cast("B") if out.nbytes else memoryview(b"")
        step = self.block_bytes if self.block_bytes > 1 else max(len(view), 1)
        for at in range(0, len(view), step):
            block = view[at : at + step]
            if len(block) < len(view):  # else the read that failed was this block
                try:
                    # With digests, even if the caller wants none: they show which of the blocks is damaged.
                    self._chunks.read_into(row, start + at, block, verify=True)
                    continue
                except DAMAGE_ERRORS as damage:
                    error = damage
            # Replacements are always verified: their bytes must be those of the save.
            self._read_replacement(row, start + at, block, error)

    def _read_replacement(self, row: int, start: int, out: memoryview, error: CheckpointError) -> None:
        """Read a damaged block from the first replacement that has it undamaged."""
        failures = []
        for name, chunks in self._open_replacements():
            try:
                chunks.read_into(row, start, out, verify=True)
            except CheckpointError as failure:
                failures.append(f"{name}: {failure}")
                continue
            self._source.record(self._recovered(row, start, len(out), name, error))
            return
        raise self._source.error_of_all(error, [*failures, *self._unusable]) from error

    def _open_replacements(self) -> list[tuple[str, Chunks]]:
        """Return the same chunks of each replacement that has them. The first call opens them."""
        with self._lock:
            if self._replacements is None:
                self._replacements = []
                for replacement in self._source.replacements():
                    try:
                        chunks = self._get(replacement.contents)
                    except CheckpointError as failure:
                        self._unusable.append(f"{replacement.name}: {failure}")
                        continue
                    # A row number has to mean the same chunk in both tables.
                    if _are_equal(chunks.table, self.table):
                        self._replacements.append((replacement.name, chunks))
                    else:
                        self._unusable.append(f"{replacement.name} lists other chunks")
            return self._replacements

    def _recovered(
        self, row: int, start: int, nbytes: int, source: str, error: CheckpointError
    ) -> RecoveredBytes:
        """Describe bytes of a chunk that were read from a replacement, with their file if it is known."""
        table, chunks = self.table, self._chunks
        record = RecoveredBytes(
            source=source,
            why=" ".join(str(error).split()),
            key=table.arrays[int(table.array[row])].key,
            box=table.describe(row),
        )
        ranges = chunks.file_ranges()
        if ranges is None:
            return record
        record = replace(record, file=ranges.files[int(ranges.file[row])])
        if self._raw is None:
            return record
        first = int(ranges.start[row]) + start
        return replace(record, start=first, stop=first + nbytes)


def _may_be_same_save(store: Store, other: Store) -> bool:
    """Return whether two commits name the same attempt, or one that names none is damaged."""
    attempts = []
    for one_store in (store, other):
        try:
            attempts.append(read_manifest(one_store).get("attempt"))
        except CheckpointError:
            return True
    return None in attempts or attempts[0] == attempts[1]


def _chunks_of_keys(keys: Iterable[str]) -> Callable[[Contents], Chunks]:
    wanted = list(keys)  # an iterator would be used up by the first source
    return lambda contents: contents.chunks(wanted)


def _are_equal(table: ChunkTable, other: ChunkTable) -> bool:
    if table.arrays != other.arrays or len(table) != len(other):
        return False
    names = ("array", "start", "shape", "flat_start", "flat_stop", "nbytes")
    return all(np.array_equal(getattr(table, name), getattr(other, name)) for name in names)


def _name_of(copy: Any) -> str:
    return os.fspath(copy) if isinstance(copy, (str, os.PathLike)) else str(copy.location)
