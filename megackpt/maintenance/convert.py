"""`megackpt.convert`: write a checkpoint in another format, chunk by chunk, in bounded memory.

The ranks of the group divide the chunks of the source between them. Chunks are copied through small buffers
and committed in one step, as in a save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megackpt.arguments import check_count, check_flags, check_seconds
from megackpt.codec import keep_unknown_values, leaf_digests
from megackpt.comm import Group, errors_on_all_ranks, group_or_world
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.chunk_bytes import ReadBuffers
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.write import PlannedSave, write_and_commit
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import ChunkParts
from megackpt.maintenance.arguments import checked_progress
from megackpt.maintenance.compare import check_equal
from megackpt.maintenance.convert_source import SourceCheckpoint, read_common_for
from megackpt.maintenance.new_checkpoint import NewCheckpoint, TargetState, check_target, prepare_target
from megackpt.metadata import OBJECT
from megackpt.storage import Location, opened_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The result of `megackpt.convert`.

    Attributes:
        location: the new checkpoint.
        backend: its format.
        version: the version of its format.
        arrays: number of global arrays.
        objects: number of objects.
        chunks: number of chunks in the new checkpoint, with objects. Long chunks of the source are cut.
        nbytes: bytes of all chunks of the source.
        is_verified: whether the new checkpoint was read again and is equal to the source.
    """

    location: str
    backend: str
    version: int
    arrays: int
    objects: int
    chunks: int
    nbytes: int
    is_verified: bool


def convert(
    source: Location,
    target: Location,
    to: SaveChoice,
    *,
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    allow_unsafe_pickle: bool = False,
    buffer_bytes: int = 4 * 1024 * 1024,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a copy of a checkpoint of any known format, in another format or in the same one.

    Collective: every rank of the group calls it. The group may have another size than the job that saved the
    source, and needs no GPU and no model. The target becomes a checkpoint in one step; if anything fails,
    there is none. Values of classes that this process does not know are copied unchanged.

    Args:
        source: a path, a URL or an open store of one checkpoint (not the root of a run).
        target: the location of the new checkpoint; created if it does not exist.
        to: the new format: a backend name (`"megackpt"`, `"torch_dist"`, `"zarr"`), `(backend, version)`,
            or a strategy.
        verify: read the new checkpoint again, and compare every byte with the source.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        allow_unsafe_pickle: as in `megackpt.verify`.
        buffer_bytes: how many bytes of a chunk are in memory at a time, if its format can be read in parts.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there is no committed checkpoint at the source.
        DeclarationError: there is already a checkpoint at the target, the format is unknown or can only be
            read, or an argument is invalid.
        IntegrityError: the source is damaged, or the new checkpoint differs from it.
        UnserializableError: the new format cannot store an object or the common state.
        UnsupportedError, MissingExtraError: the format has no digests of arrays, or needs an extra that is
            not installed.
        CheckpointError: each of these, and every other error; the same on all ranks.

    >>> convert("run/iter_0000100", "for_analysis", "zarr").is_verified  # doctest: +SKIP
    True
    """
    check_seconds("timeout_s", timeout_s)
    check_count("buffer_bytes", buffer_bytes)
    check_flags(verify=verify, overwrite=overwrite, array_digests=array_digests)
    check_flags(allow_unsafe_pickle=allow_unsafe_pickle)
    progress = checked_progress(progress)
    group = group_or_world(group, timeout_s=timeout_s)
    with ExitStack() as stack:
        stack.enter_context(keep_unknown_values())
        with errors_on_all_ranks(group, "opening the source"):
            strategy = save_strategy(to)
            conversion = _Conversion(
                source=stack.enter_context(opened_store(source)),
                target=stack.enter_context(opened_store(target)),
                strategy=with_array_digests(strategy) if array_digests else strategy,
                group=group,
                progress=progress,
                allow_unsafe_pickle=allow_unsafe_pickle,
                buffer_bytes=buffer_bytes,
            )
            opened = conversion.open_source()
            prepared = conversion.prepare(opened, overwrite=overwrite)
        object_sizes = {row: len(blob) for row, blob in opened.blobs.items()}
        attempt, all_sizes = conversion.exchange(opened.contents.identity, object_sizes)
        copied = opened.with_object_sizes(all_sizes)
        with conversion.removed_on_error(prepared.state, attempt):
            conversion.write(copied, prepared, attempt)
            if verify:
                conversion.verify(copied, prepared)
    table = opened.plan.table
    is_object = np.array([spec.dtype == OBJECT for spec in table.arrays], np.bool_)
    return ConvertReport(
        location=conversion.target.location,
        backend=strategy.backend,
        version=strategy.version,
        arrays=sum(spec.dtype != OBJECT for spec in opened.contents.arrays.values()),
        objects=int(is_object[table.array].sum()) if len(table) else 0,
        chunks=len(table),
        nbytes=int(table.nbytes.sum()),
        is_verified=verify,
    )


@dataclass(frozen=True, slots=True)
class _PreparedTarget:
    """The data that only rank 0 has before the conversion writes.

    Attributes:
        common: common state and content metadata, as the new format stores them.
        state: the files at the target before the conversion.
    """

    common: tuple[Any, Any] = (None, None)
    state: TargetState = field(default_factory=TargetState)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion(NewCheckpoint):
    """The steps of a conversion; for the fields see the arguments of `convert`."""

    allow_unsafe_pickle: bool

    def open_source(self) -> SourceCheckpoint:
        """Open the source on this rank, and encode this rank's objects."""
        return SourceCheckpoint.open(
            self.source,
            self.strategy,
            rank=self.group.rank,
            ranks=self.group.size,
            allow_unsafe_pickle=self.allow_unsafe_pickle,
        )

    def prepare(self, opened: SourceCheckpoint, *, overwrite: bool) -> _PreparedTarget:
        """Check and create the target, and read common state, on rank 0. Nothing is written yet."""
        if self.group.rank > 0:
            return _PreparedTarget()
        check_target(self.target, self.source, self.strategy, overwrite=overwrite)
        common = read_common_for(self.strategy, opened.stored, self.source)
        self.strategy.check_common({"state_dict": common[0], "content_metadata": common[1]})
        return _PreparedTarget(common, prepare_target(self.target, self.strategy))

    def write(self, copied: SourceCheckpoint, prepared: _PreparedTarget, attempt: str) -> None:
        """Write and commit the new checkpoint. Collective."""
        self.progress.begin("writing", self._nbytes(copied))
        save = PlannedSave(
            attempt=attempt,
            plan=copied.plan,
            parts=_CopiedParts(copied, self),
            common={"state_dict": prepared.common[0], "content_metadata": prepared.common[1]},
            strategy=self.strategy,
            leftovers=prepared.state.earlier,
        )
        write_and_commit(save, self.target, self.group)

    def verify(self, copied: SourceCheckpoint, prepared: _PreparedTarget) -> None:
        """Compare the new checkpoint with the source, each rank its share. Collective.

        Raises:
            IntegrityError: they differ.
        """
        self.progress.begin("verifying", self._nbytes(copied))
        with errors_on_all_ranks(self.group, "verifying the new checkpoint"):
            self._compare(copied, prepared)

    def _nbytes(self, copied: SourceCheckpoint) -> int:
        """Return the size of this rank's share."""
        return int(copied.plan.table.nbytes[copied.plan.rows_of(self.group.rank)].sum())

    def _compare(self, copied: SourceCheckpoint, target: _PreparedTarget) -> None:
        rows = np.sort(copied.plan.rows_of(self.group.rank)).tolist()
        written = open_checkpoint(self.target, allow_unsafe_pickle=self.allow_unsafe_pickle)
        where = self.target.location
        _check_arrays(copied.contents, written, where)
        check_equal(
            [copied.blocks_of(row) for row in rows if row not in copied.blobs],
            copied.chunks,
            written,
            buffer_bytes=self.buffer_bytes,
            where=where,
            progress=self.progress.advance,
        )
        _check_objects(copied, written, where)
        self.progress.advance(sum(map(len, copied.blobs.values())))
        if self.group.rank == 0:
            common = read_common_for(self.strategy, written, self.target)
            _check_common(target.common, common, where)


class _CopiedParts(ChunkParts):
    """The bytes of this rank's rows, read from the source. Reports progress."""

    def __init__(self, copied: SourceCheckpoint, conversion: _Conversion) -> None:
        self._copied, self._buffers = copied, ReadBuffers()
        self._buffer_bytes, self._progress = conversion.buffer_bytes, conversion.progress

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the parts of a row."""
        for part in self._copied.read(row, self._buffers, self._buffer_bytes):
            # Reported before the part is written: a format may not request another part after the last one.
            self._progress.advance(len(part))
            yield part


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
