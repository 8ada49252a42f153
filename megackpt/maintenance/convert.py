"""A checkpoint in another format: chunk by chunk, in bounded memory, verified.

Owns the order of the steps. Nothing is resharded: the chunks of the source, long ones cut into blocks of
rows, become those of the new checkpoint, as far as its format can have them. They are spread over the ranks
of the group, go through buffers of bounded size, and are committed all at once, as in a save.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt.codec import carrying_unknown, leaf_digests
from megackpt.comm import Group, run_on_all_ranks
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.common_reading import read_whole_common, without_referenced
from megackpt.engine.checkpoint.opening import check_readable, open_checkpoint, read_common_and_references
from megackpt.engine.data.chunk_bytes import ReadBuffers
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.write import PlannedSave, write_out
from megackpt.errors import CheckpointError, DeclarationError, IntegrityError, MismatchError
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.formats.strategy import MANIFEST, ChunkParts, SaveStrategy
from megackpt.geometry import Ints
from megackpt.maintenance.compare import compare_chunks
from megackpt.metadata import OBJECT, ChunkTable, DeclaredChunks
from megackpt.options import ConvertOptions
from megackpt.planning import SavePlan, plan_copy, with_sizes
from megackpt.storage import LocalStore, ObjectStore, Store
from megackpt.validation import check_coverage


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was converted.

    Attributes:
        arrays: number of global arrays.
        objects: number of objects.
        chunks: number of chunks that were handed to the new format, objects among them; long ones of the
            source were cut.
        nbytes: bytes of all chunks in the source.
        verified: whether the new checkpoint was read again and found equal.
    """

    arrays: int
    objects: int
    chunks: int
    nbytes: int
    verified: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """What to convert, into what and how; as the arguments of `convert_checkpoint`."""

    source: Store
    target: Store
    strategy: SaveStrategy
    group: Group
    options: ConvertOptions
    progress: Progress


@dataclass(frozen=True, slots=True)
class _Opened:
    """One rank's view of the source, before anything is written.

    Attributes:
        contents: the source.
        chunks: all of its chunks.
        start: where each chunk of plan begins in the one of the source that it is a part of, in bytes.
        plan: who writes which of them; objects still with the lengths they have in the source.
        blobs: this rank's objects as the new format holds them, by row of plan.
        common: common state and content metadata; of rank 0, None elsewhere.
        earlier: what is at the new place; of rank 0.
        others: files at the new place before; None if they are a checkpoint, and on other ranks than 0.
    """

    contents: Contents
    chunks: Chunks
    plan: SavePlan
    start: Ints
    blobs: Mapping[int, bytes]
    common: tuple[Any, Any]
    earlier: manifest.LeftoverFiles
    others: frozenset[str] | None


@carrying_unknown()
def convert_checkpoint(
    source: Store,
    target: Store,
    strategy: SaveStrategy,
    group: Group,
    options: ConvertOptions,
    progress: Progress,
) -> ConvertReport:
    """Write a checkpoint of any known format once more, in that of a strategy. Collective over the group.

    The group may have any size; it has nothing to do with the ranks that saved the source. Values of classes
    that this process does not know are carried along as stand-ins.

    Raises:
        IntegrityError: the source is damaged, or the new checkpoint, read again, differs; nothing is
            committed then.
        UnserializableError: the new format cannot hold an object or the common state.
        DeclarationError: there is a checkpoint at the new place already.
        UnsupportedError, MissingExtraError: digests of arrays are asked for and cannot be had.
        CheckpointError: each of these, and every other error; the same on all ranks.
    """
    jobs: list[_Job] = []
    opened: list[_Opened] = []

    def open_source() -> bytes:
        chosen = with_array_digests(strategy) if options.array_digests else strategy
        jobs.append(_Job(source, target, chosen, group, options, progress))
        opened.append(_open(jobs[0]))
        lengths = {row: len(blob) for row, blob in opened[0].blobs.items()}
        said = {"opened": opened[0].contents.identity, "attempt": manifest.new_attempt()}
        return json.dumps({**said, "lengths": sorted(lengths.items())}).encode()

    answers = [json.loads(a) for a in run_on_all_ranks(group, open_source, doing="opening the source")]
    if any(answer["opened"] != answers[0]["opened"] for answer in answers):
        raise MismatchError(
            f"{source.location} was saved anew while it was being opened: ranks see different checkpoints. "
            f"Convert again.",
            path=source.location,
        )
    (job,), (local,) = jobs, opened
    nbytes = local.plan.table.nbytes.copy()
    for answer in answers:
        for row, length in answer["lengths"]:
            nbytes[row] = length
    planned = _planned(job, local, answers[0]["attempt"], with_sizes(local.plan, nbytes))
    progress.begin("writing", int(nbytes[planned.plan.writer == group.rank].sum()))
    try:
        write_out(planned, target, job.strategy, group)
        if options.verify:
            _verify(job, local, planned)
    except Exception:
        _take_back(job, local, planned.attempt)
        raise
    objects = sum(1 for row in local.plan.table.array.tolist() if _is_object(local.plan, row))
    return ConvertReport(
        arrays=sum(1 for spec in local.contents.arrays.values() if spec.dtype != OBJECT),
        objects=objects,
        chunks=len(local.plan.table),
        nbytes=int(local.plan.table.nbytes.sum()),
        verified=options.verify,
    )


def _is_object(plan: SavePlan, array: int) -> bool:
    return plan.table.arrays[array].dtype == OBJECT


def _open(job: _Job) -> _Opened:
    """Open the source, refuse what cannot be converted, and prepare this rank's objects."""
    contents = open_checkpoint(job.source, allow_unsafe_pickle=job.options.allow_unsafe_pickle)
    whole = contents
    if not job.strategy.capabilities.refers_to_arrays:  # they become tensors of common state, and no arrays
        contents = without_referenced(contents, job.source)
    check_readable(contents.unreadable, contents.unreadable, where=job.source.location)
    chunks = contents.chunks(sorted(contents.arrays))
    copy = plan_copy(chunks.table, chunks.position, ranks=job.group.size, block_bytes=chunks.block_bytes)
    plan = replace(copy.plan, table=_only_arrays(copy.plan.table, contents.arrays))
    check_coverage(_declared(plan))
    common: tuple[Any, Any] = (None, None)
    if job.group.rank == 0:
        _refuse_place(job)
        common = _common_of(job, whole, job.source)
        # What is refused is refused before anything is written.
        job.strategy.check_common({"state_dict": common[0], "content_metadata": common[1]})
    blobs = {}
    for row in plan.rows_of(job.group.rank).tolist():
        if _is_object(plan, int(plan.table.array[row])):
            key = plan.table.arrays[int(plan.table.array[row])].key
            data = read_chunk(chunks, int(plan.entity[row]))
            value = contents.decode_object(data, f"{job.source.location}: object {key!r}")
            blobs[row] = job.strategy.encode_object(value, path=key)
    if job.group.rank > 0:
        return _Opened(contents, chunks, plan, copy.start, blobs, common, manifest.LeftoverFiles(), None)
    job.target.create()
    earlier = manifest.find_leftover_files(job.target, job.strategy)
    others = None if manifest.is_committed(job.target) else frozenset(job.target.names())
    return _Opened(contents, chunks, plan, copy.start, blobs, common, earlier, others)


def _common_of(job: _Job, contents: Contents, store: Store) -> tuple[Any, Any]:
    """Return common state and content metadata, with references to arrays if the new format can hold them.

    For other formats the arrays are read: all of these tensors are in memory then, as in a save.
    """
    if job.strategy.capabilities.refers_to_arrays:
        return read_common_and_references(contents, where=store.location)
    return read_whole_common(contents, store)


def _only_arrays(table: ChunkTable, keys: Container[str]) -> ChunkTable:
    """Return chunks of none but these arrays without the other arrays, which a format lists as well."""
    is_kept = np.array([spec.key in keys for spec in table.arrays], np.bool_)
    if is_kept.all():
        return table
    number = np.cumsum(is_kept) - 1  # of each array that is kept, among these
    arrays = tuple(spec for spec in table.arrays if spec.key in keys)
    return replace(table, arrays=arrays, array=number[table.array])


def _declared(plan: SavePlan) -> DeclaredChunks:
    rows = len(plan.table)
    yes, no = np.ones(rows, np.bool_), np.zeros(rows, np.bool_)
    return DeclaredChunks(plan.table, yes, no, plan.writer, plan.entity)


def _refuse_place(job: _Job) -> None:
    """Refuse to write where a checkpoint is that would be lost.

    Raises:
        DeclarationError: there is one, and it may not, or cannot all at once, be replaced.
    """
    target, strategy = job.target, job.strategy
    if _is_same_place(target, job.source):
        raise DeclarationError(
            f"{target.location} is to be converted into itself. Name another directory.", path=target.location
        )
    if not manifest.is_committed(target):
        return
    if not job.options.overwrite:
        raise DeclarationError(
            f"{target.location} holds a checkpoint already. Name another directory, or allow to "
            f"overwrite it.",
            path=target.location,
        )
    there = manifest.read_manifest(target)
    found = (there.get("sharded_backend"), there.get("sharded_backend_version"))
    if found != (strategy.backend, strategy.version):
        raise DeclarationError(
            f"{target.location} holds a checkpoint of format {found[0]!r} version {found[1]!r}; one of "
            f"another format cannot take its place in one step. Name another directory, or remove it first.",
            path=target.location,
        )


def _is_same_place(first: Store, second: Store) -> bool:
    if isinstance(first, LocalStore) and isinstance(second, LocalStore):
        return os.path.realpath(first.location) == os.path.realpath(second.location)
    if isinstance(first, ObjectStore) and isinstance(second, ObjectStore):
        return first.location == second.location
    return first is second


class _CopiedParts(ChunkParts):
    """The bytes of this rank's rows: its objects from memory, anything else from the source."""

    def __init__(self, job: _Job, local: _Opened, plan: SavePlan) -> None:
        self._job, self._local, self._plan = job, local, plan
        self._buffers = ReadBuffers()

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the parts of a row."""
        job, local = self._job, self._local
        if row in local.blobs:
            parts = iter([memoryview(local.blobs[row])])
        else:
            parts = self._buffers.pieces(
                local.chunks,
                int(self._plan.entity[row]),
                start=int(local.start[row]),
                stop=int(local.start[row] + self._plan.table.nbytes[row]),
                buffer_bytes=job.options.buffer_bytes,
            )
        for part in parts:
            yield part
            job.progress.advance(len(part))


def _planned(job: _Job, local: _Opened, attempt: str, plan: SavePlan) -> PlannedSave:
    """Return the save of this rank's share."""
    common = {"state_dict": local.common[0], "content_metadata": local.common[1]}
    return PlannedSave(attempt, plan, _CopiedParts(job, local, plan), common, local.earlier)


def _verify(job: _Job, local: _Opened, planned: PlannedSave) -> None:
    """Compare the new checkpoint with the source; if it differs, take it away again."""

    def compare() -> bytes:
        written = open_checkpoint(job.target, allow_unsafe_pickle=job.options.allow_unsafe_pickle)
        _compare_arrays(local, written, job.target.location)
        mine = np.sort(planned.plan.rows_of(job.group.rank))
        job.progress.begin("verifying", int(planned.plan.table.nbytes[mine].sum()))
        compare_chunks(
            [_part(local, row) for row in mine.tolist() if row not in local.blobs],
            local.chunks,
            written,
            buffer_bytes=job.options.buffer_bytes,
            where=job.target.location,
            progress=job.progress.advance,
        )
        _compare_objects(local, written, job.target.location)
        job.progress.advance(sum(map(len, local.blobs.values())))
        if job.group.rank == 0:
            _compare_common(local.common, _common_of(job, written, job.target), job.target.location)
        return b""

    run_on_all_ranks(job.group, compare, doing="verifying the new checkpoint")


def _part(local: _Opened, row: int) -> Part:
    """Return the blocks of the source that a row of the plan begins, so that each belongs to one row."""
    entity, block = int(local.plan.entity[row]), local.chunks.block_bytes
    start, stop = int(local.start[row]), int(local.start[row] + local.plan.table.nbytes[row])
    whole = stop == int(local.chunks.table.nbytes[entity])
    return Part(entity, start // block * block, stop if whole else stop // block * block)


def _take_back(job: _Job, local: _Opened, attempt: str) -> None:
    """Remove what a failed conversion has left, as far as that is possible, the commit first.

    Where there was no checkpoint before, that is every file that was not there either: not all formats put
    an attempt into the names of their files.
    """
    if job.group.rank > 0:
        return
    if local.others is None:
        manifest.withdraw(job.target, attempt=attempt, strategy=job.strategy)
        return
    with contextlib.suppress(CheckpointError):
        if MANIFEST not in local.others:
            job.target.delete([MANIFEST])
            job.target.sync()
        job.target.delete([name for name in job.target.names() if name not in local.others])
        job.target.sync()


def _compare_arrays(local: _Opened, written: Contents, where: str) -> None:
    if dict(local.contents.arrays) == dict(written.arrays):
        return
    keys = sorted({*local.contents.arrays, *written.arrays})
    key = next(k for k in keys if local.contents.arrays.get(k) != written.arrays.get(k))
    raise IntegrityError(
        f"{key!r}: {where} has it as {written.arrays.get(key)}, and the source as "
        f"{local.contents.arrays.get(key)}.",
        key=key,
        path=where,
    )


def _compare_objects(local: _Opened, written: Contents, where: str) -> None:
    if not local.blobs:
        return
    keys = {local.plan.table.arrays[int(local.plan.table.array[row])].key for row in local.blobs}
    found = written.chunks(sorted(keys))
    rows = {_place(found, row): row for row in range(len(found.table))}
    source = local.plan.table
    for row, blob in local.blobs.items():
        key = source.arrays[int(source.array[row])].key
        at = rows.get(_place(local.chunks, int(local.plan.entity[row])))
        if at is None or read_chunk(found, at) != blob:
            raise IntegrityError(
                f"{key!r} {source.describe(row)}: {where} has not the object that was written.",
                key=key,
                path=where,
            )


def _place(chunks: Chunks, row: int) -> tuple[str, tuple[int, ...]]:
    table = chunks.table
    spec = table.arrays[int(table.array[row])]
    return spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())


def _compare_common(source: tuple[Any, Any], written: tuple[Any, Any], where: str) -> None:
    expected, found = (leaf_digests(list(pair)) for pair in (source, written))
    if expected == found:
        return
    path = next(p for p in sorted({*expected, *found}) if expected.get(p) != found.get(p))
    raise IntegrityError(
        f"{where}: the common state differs at {path!r} from that of the source.", path=where
    )
