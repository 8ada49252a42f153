"""Writes the contents of a checkpoint, or of anything that can be opened as one, as a new checkpoint.

The ranks of the group divide the chunks of the source between them. Chunks are copied through small buffers
and committed in one step, as in a save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from megackpt.codec import keep_unknown_values, leaf_digests
from megackpt.comm import Group, errors_on_all_ranks, group_or_world
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.chunk_bytes import ReadBuffers
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.saving.integrity import with_array_digests
from megackpt.engine.saving.planned_save import PlannedSave, SaveHook, WrittenChunks
from megackpt.engine.saving.write import write_and_commit
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import ChunkParts
from megackpt.ground.arguments import check_count, check_flags, check_seconds
from megackpt.plans.metadata import OBJECT
from megackpt.storage import FileDigester, Location, Store, opened_store
from megackpt.whole.arguments import checked_progress
from megackpt.whole.copy_source import SourceCheckpoint, check_unchanged, read_common_for
from megackpt.whole.new_checkpoint import NewCheckpoint, TargetState, check_target, prepare_target
from megackpt.whole.windows import (
    ByteArray,
    RowWindow,
    filled_windows,
    read_parts,
    request_of,
    row_windows,
    window_threads,
    windows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of `megackpt.convert`, and of imports.

    Attributes:
        location: the new checkpoint.
        origin: what wrote the source, such as "DeepSpeed 0.19.8, ZeRO-2, 8 ranks"; "" for a checkpoint.
        left_out: what of the source is not in the new checkpoint, each with the reason.
        backend: format of the new checkpoint.
        version: the version of its format.
        arrays: number of global arrays.
        objects: number of objects.
        chunks: number of chunks in the new checkpoint, with objects. Long chunks of the source are cut.
        nbytes: bytes of all chunks of the source.
        is_verified: whether the new checkpoint was read again and is equal to what was written.
        map: name of the map by which arrays of the source have got other names; "" if they keep theirs.
        files: names of the tokenizer's and other small files that are part of the new checkpoint.
    """

    location: str
    origin: str
    left_out: tuple[str, ...]
    backend: str
    version: int
    arrays: int
    objects: int
    chunks: int
    nbytes: int
    is_verified: bool
    map: str = ""
    files: tuple[str, ...] = ()


def copy_checkpoint(
    source: Location,
    target: Location,
    to: SaveChoice,
    *,
    open_source: Callable[[Store], Contents] | None = None,
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    allow_unsafe_pickle: bool = False,
    buffer_bytes: int = 4 * 1024 * 1024,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Write a copy of what a location holds. Collective.

    Args:
        source: as for `megackpt.convert`, and so are all other arguments.
        target: the new checkpoint.
        to: its format.
        open_source: opens the source; by default as a checkpoint of any known format.
        verify: also compare the checksums that the source has of its files.
        overwrite: replace a checkpoint of the same format.
        array_digests: store a digest of each array.
        allow_unsafe_pickle: for the source.
        buffer_bytes: how many bytes of a chunk are in memory at a time.
        timeout_s: for each synchronisation point, in seconds.
        group: the ranks that take part.
        progress: for this rank's share.

    Raises:
        CheckpointError: as `megackpt.convert`; the same on all ranks.
    """
    check_seconds("timeout_s", timeout_s)
    check_count("buffer_bytes", buffer_bytes)
    check_flags(verify=verify, overwrite=overwrite, array_digests=array_digests)
    check_flags(allow_unsafe_pickle=allow_unsafe_pickle)
    progress = checked_progress(progress)
    group = group_or_world(group, timeout_s=timeout_s)
    open_stored = partial(open_checkpoint, allow_unsafe_pickle=allow_unsafe_pickle)
    with ExitStack() as stack:
        stack.enter_context(keep_unknown_values())
        with errors_on_all_ranks(group, "opening the source"):
            strategy = save_strategy(to)
            opened_source = stack.enter_context(opened_store(source))
            run = _Copy(
                changed=opened_source.watch(),
                source=opened_source,
                target=stack.enter_context(opened_store(target)),
                strategy=with_array_digests(strategy) if array_digests else strategy,
                group=group,
                progress=progress,
                buffer_bytes=buffer_bytes,
                open_target=open_stored,
            )
            opened = run.open_source(open_source or open_stored, checks_bytes=verify)
            prepared = run.prepare(opened, overwrite=overwrite)
        object_sizes = {row: len(blob) for row, blob in opened.blobs.items()}
        attempt, all_sizes = run.exchange(opened.identity(), object_sizes)
        copied = opened.with_object_sizes(all_sizes)
        with run.removed_on_error(prepared.state, attempt):
            digests = run.write(copied, prepared, attempt)
            if verify:
                run.verify(copied, digests, prepared)
    return run.report(opened, is_verified=verify)


@dataclass(frozen=True, slots=True)
class _PreparedTarget:
    """The data that only rank 0 has before the copy writes.

    Attributes:
        common: common state and content metadata, as the new format stores them.
        state: the files at the target before the copy.
    """

    common: tuple[Any, Any] = (None, None)
    state: TargetState = field(default_factory=TargetState)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy(NewCheckpoint):
    """The steps of a copy; for the fields see the arguments of `copy_checkpoint`."""

    open_target: Callable[[Store], Contents]
    changed: Callable[[], str | None]

    def open_source(
        self, open_source: Callable[[Store], Contents], *, checks_bytes: bool
    ) -> SourceCheckpoint:
        """Open the source on this rank, and encode this rank's objects."""
        contents = open_source(self.source)
        if checks_bytes and contents.check_bytes is not None and self.group.rank == 0:
            contents.check_bytes()
        return SourceCheckpoint.of(
            contents, self.source, self.strategy, rank=self.group.rank, ranks=self.group.size
        )

    def prepare(self, opened: SourceCheckpoint, *, overwrite: bool) -> _PreparedTarget:
        """Check and create the target, and read common state, on rank 0. Nothing is written yet."""
        if self.group.rank > 0:
            return _PreparedTarget()
        check_target(self.target, self.source, self.strategy, overwrite=overwrite)
        common = read_common_for(self.strategy, opened.stored, self.source)
        self.strategy.check_common({"state_dict": common[0], "content_metadata": common[1]})
        return _PreparedTarget(common, prepare_target(self.target, self.strategy))

    def write(self, copied: SourceCheckpoint, prepared: _PreparedTarget, attempt: str) -> dict[int, str]:
        """Write and commit the new checkpoint; return the digests of this rank's rows. Collective."""
        self.progress.begin("writing", self._nbytes(copied))
        with window_threads() as threads:
            parts = _CopiedParts(copied, self, threads)
            save = PlannedSave(
                attempt=attempt,
                plan=copied.plan,
                parts=parts,
                common={"state_dict": prepared.common[0], "content_metadata": prepared.common[1]},
                strategy=self.strategy,
                leftovers=prepared.state.earlier,
                hooks=(_UnchangedSource(copied.contents, self.changed, self.source),),
                unpadded=copied.contents.unpadded,
            )
            write_and_commit(save, self.target, self.group)
        return parts.digests

    def verify(self, copied: SourceCheckpoint, digests: dict[int, str], prepared: _PreparedTarget) -> None:
        """Read the new checkpoint, each rank its rows, and compare it with what was written. Collective.

        Raises:
            IntegrityError: they differ.
        """
        self.progress.begin("verifying", self._nbytes(copied))
        with errors_on_all_ranks(self.group, "verifying the new checkpoint"):
            self._compare(copied, digests, prepared)

    def report(self, opened: SourceCheckpoint, *, is_verified: bool) -> CopyReport:
        """Return the counts of the whole checkpoint."""
        table = opened.plan.table
        return CopyReport(
            location=self.target.location,
            origin=opened.contents.origin,
            left_out=tuple(opened.contents.left_out),
            backend=self.strategy.backend,
            version=self.strategy.version,
            arrays=sum(spec.dtype != OBJECT for spec in opened.contents.arrays.values()),
            objects=int(table.are_objects().sum()),
            chunks=len(table),
            nbytes=int(table.nbytes.sum()),
            is_verified=is_verified,
        )

    def _nbytes(self, copied: SourceCheckpoint) -> int:
        """Return the size of this rank's share."""
        return int(copied.plan.table.nbytes[copied.plan.rows_of(self.group.rank)].sum())

    def _compare(self, copied: SourceCheckpoint, digests: dict[int, str], prepared: _PreparedTarget) -> None:
        written, where = self.open_target(self.target), self.target.location
        _check_arrays(copied.contents, written, where)
        rows = np.sort(copied.plan.rows_of(self.group.rank)).tolist()
        rows = [row for row in rows if row not in copied.blobs]
        with window_threads() as threads:
            for row, digest in self._digests_of(written, copied, rows, threads):
                if digest != digests.get(row):
                    raise _difference(copied, row, where)
        _check_objects(copied, written, where)
        self.progress.advance(sum(map(len, copied.blobs.values())))
        if self.group.rank == 0:
            _check_common(prepared.common, read_common_for(self.strategy, written, self.target), where)

    def _digests_of(
        self, written: Contents, copied: SourceCheckpoint, rows: Sequence[int], threads: Executor
    ) -> Iterator[tuple[int, str]]:
        """Yield each row with the digest of its bytes in the new checkpoint."""
        table, where = copied.plan.table, self.target.location

        def fill(window: RowWindow, data: ByteArray) -> None:
            read_parts(written, [request_of(table, part, data) for part in window.segments], where=where)

        digester = FileDigester()
        windows = list(row_windows(table, rows, self.buffer_bytes))
        for window, data in filled_windows(windows, fill, threads):
            for row, start, stop, at in window.segments:
                digester.update(data[at : at + stop - start].data)
                self.progress.advance(stop - start)
                if stop == int(table.nbytes[row]):
                    yield row, digester.hexdigest()
                    digester = FileDigester()


@dataclass(frozen=True, slots=True)
class _UnchangedSource(SaveHook):
    """Looks at the files of the source again before the commit: an earlier checkpoint is then still there."""

    contents: Contents
    changed: Callable[[], str | None]
    source: Store

    def after_writing(self, written: WrittenChunks, store: Store, group: Group) -> list[bytes]:
        """Raise an error on all ranks if a file is not the one that was opened."""
        with errors_on_all_ranks(group, "looking at the source again"):
            if self.contents.check_unchanged is not None:
                self.contents.check_unchanged()
            check_unchanged(self.changed, self.source)
        return []


class _CopiedParts(ChunkParts):
    """The bytes of this rank's rows, read from the source. Keeps their digests, and reports progress.

    Attributes:
        digests: of the rows that were written, by row.
    """

    def __init__(self, copied: SourceCheckpoint, run: _Copy, threads: Executor) -> None:
        self._copied, self._buffers, self._threads = copied, ReadBuffers(), threads
        self._buffer_bytes, self._progress = run.buffer_bytes, run.progress
        self.digests: dict[int, str] = {}

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the parts of a row."""
        return self._noted(row, self._copied.read(row, self._buffers, self._buffer_bytes))

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the parts of each row; the next parts are read meanwhile."""
        copied = self._copied
        to_read = (row for row in rows if row not in copied.blobs)
        parts = (part for row in to_read for part in copied.parts(row, self._buffer_bytes))
        stream = self._read(list(windows_of(parts, self._buffer_bytes)))
        for row in rows:
            yield self(row) if row in copied.blobs else self._noted(row, stream)

    def _read(self, windows: Sequence[RowWindow]) -> Iterator[memoryview]:
        """Yield the bytes of rows, one after the other."""
        copied = self._copied

        def fill(window: RowWindow, data: ByteArray) -> None:
            parts = [Part(int(copied.plan.entity[s.row]), s.start, s.stop) for s in window.segments]
            outs = [data[s.at : s.at + s.stop - s.start].data for s in window.segments]
            copied.chunks.read_parts(parts, outs)

        for window, data in filled_windows(windows, fill, self._threads):
            for row, start, stop, at in window.segments:
                # A part is made of whole blocks of the source, and may begin before the row, or end after it.
                first = int(copied.start[row])
                last = first + int(copied.plan.table.nbytes[row])
                yield data[at + max(first - start, 0) : at + min(last, stop) - start].data

    def _noted(self, row: int, parts: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield the parts of a row, of an iterator that may go on with other rows; keep its digest."""
        digester = FileDigester()
        left = int(self._copied.plan.table.nbytes[row])
        while left:
            part = next(parts)
            digester.update(part)
            left -= len(part)
            if left == 0:  # a format may not request another part after the last one
                self.digests[row] = digester.hexdigest()
            self._progress.advance(len(part))
            yield part


def _difference(copied: SourceCheckpoint, row: int, where: str) -> IntegrityError:
    table = copied.plan.table
    key = table.arrays[int(table.array[row])].key
    return IntegrityError(
        f"{key!r} {table.describe(row)}: {where} has other bytes than were written. Suspect the storage.",
        key=key,
        path=where,
    )


def _check_arrays(source: Contents, written: Contents, where: str) -> None:
    for key in sorted({*source.arrays, *written.arrays}):
        expected, stored = source.arrays.get(key), written.arrays.get(key)
        if expected != stored:
            raise IntegrityError(
                f"{key!r}: {where} has {stored}, and the source {expected}. Suspect the storage.",
                key=key,
                path=where,
            )


def _check_objects(copied: SourceCheckpoint, written: Contents, where: str) -> None:
    if not copied.blobs:
        return
    table = copied.plan.table
    keys = {row: table.arrays[int(table.array[row])].key for row in copied.blobs}
    chunks = written.chunks(sorted(set(keys.values())))
    stored_rows = {_object_id(chunks, row): row for row in range(len(chunks.table))}
    for row, blob in copied.blobs.items():
        stored_row = stored_rows.get(_object_id(copied.chunks, int(copied.plan.entity[row])))
        if stored_row is None or read_chunk(chunks, stored_row) != blob:
            raise IntegrityError(
                f"{keys[row]!r} {table.describe(row)}: {where} does not have the object that was written. "
                f"Suspect the storage.",
                key=keys[row],
                path=where,
            )


def _object_id(chunks: Chunks, row: int) -> tuple[str, tuple[int, ...]]:
    """Return the key of an object, and its offset in the array of objects."""
    table = chunks.table
    spec = table.arrays[int(table.array[row])]
    return spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())


def _check_common(source: tuple[Any, Any], written: tuple[Any, Any], where: str) -> None:
    expected, stored = (leaf_digests(list(pair)) for pair in (source, written))
    if expected != stored:
        path = next(p for p in sorted({*expected, *stored}) if expected.get(p) != stored.get(p))
        raise IntegrityError(
            f"{where}: its common state differs from that of the source at {path!r}. Suspect the storage.",
            path=where,
        )
