"""`megackpt.convert`: write a checkpoint in another format, chunk by chunk, in bounded memory.

The ranks of the group divide the chunks of the source between them. Chunks are copied through small buffers
and committed in one step, as in a save.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megackpt.arguments import check_count, check_flag, check_seconds
from megackpt.codec import keep_unknown_values, leaf_digests
from megackpt.comm import Group, check_group, errors_on_all_ranks, run_on_all_ranks, world_group
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.chunk_bytes import ReadBuffers
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.write import PlannedSave, write_and_commit
from megackpt.errors import IntegrityError, MismatchError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.maintenance.arguments import checked_progress
from megackpt.maintenance.compare import check_equal
from megackpt.maintenance.convert_source import SourceCheckpoint, read_common_for
from megackpt.maintenance.convert_target import TargetState, check_target, prepare_target, remove_attempt
from megackpt.metadata import OBJECT
from megackpt.storage import Location, Store, opened_store


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
    flags = {"verify": verify, "overwrite": overwrite, "array_digests": array_digests}
    for name, flag in (flags | {"allow_unsafe_pickle": allow_unsafe_pickle}).items():
        check_flag(name, flag)
    progress = checked_progress(progress)
    if group is None:
        group = world_group(timeout_s=timeout_s)
    check_group(group)
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
            common = conversion.prepare(opened, overwrite=overwrite)
        attempt, copied = conversion.exchange(opened)
        conversion.write(copied, common, attempt, verify=verify)
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
class _Conversion:
    """The steps of a conversion; for the fields see the arguments of `convert`."""

    source: Store
    target: Store
    strategy: SaveStrategy
    group: Group
    progress: Progress
    allow_unsafe_pickle: bool
    buffer_bytes: int

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

    def exchange(self, opened: SourceCheckpoint) -> tuple[str, SourceCheckpoint]:
        """Return rank 0's attempt id, and the source with the sizes of all ranks' objects. Collective.

        Raises:
            MismatchError: ranks have opened different checkpoints.
        """
        sizes = [(row, len(blob)) for row, blob in sorted(opened.blobs.items())]
        message = {"identity": opened.contents.identity, "attempt": manifest.new_attempt(), "sizes": sizes}
        messages = [
            json.loads(data)
            for data in run_on_all_ranks(
                self.group, lambda: json.dumps(message).encode(), doing="comparing the opened source"
            )
        ]
        if any(message["identity"] != messages[0]["identity"] for message in messages):
            raise MismatchError(
                f"{self.source.location} was saved again while it was opened: ranks see different "
                f"checkpoints. Convert again.",
                path=self.source.location,
            )
        all_sizes = {row: size for message in messages for row, size in message["sizes"]}
        return messages[0]["attempt"], opened.with_object_sizes(all_sizes)

    def write(self, copied: SourceCheckpoint, target: _PreparedTarget, attempt: str, *, verify: bool) -> None:
        """Write and commit the new checkpoint, and compare it with the source. Collective.

        If anything fails, the new checkpoint is removed.
        """
        rows = copied.plan.rows_of(self.group.rank)
        nbytes = int(copied.plan.table.nbytes[rows].sum())
        common = {"state_dict": target.common[0], "content_metadata": target.common[1]}
        self.progress.begin("writing", nbytes)
        try:
            save = PlannedSave(
                attempt=attempt,
                plan=copied.plan,
                parts=_CopiedParts(copied, self),
                common=common,
                strategy=self.strategy,
                leftovers=target.state.earlier,
            )
            write_and_commit(save, self.target, self.group)
            if verify:
                self.progress.begin("verifying", nbytes)
                with errors_on_all_ranks(self.group, "verifying the new checkpoint"):
                    self._verify(copied, target, np.sort(rows).tolist())
        except Exception:
            if self.group.rank == 0:
                remove_attempt(self.target, target.state, attempt=attempt, strategy=self.strategy)
            raise

    def _verify(self, copied: SourceCheckpoint, target: _PreparedTarget, rows: list[int]) -> None:
        """Compare this rank's share of the new checkpoint with the source.

        Raises:
            IntegrityError: they differ.
        """
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
