"""The source of a copy: its content, and which rank copies which chunk."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt.engine.checkpoint.common_reading import (
    read_whole_common,
    without_referenced,
    without_references,
)
from megackpt.engine.checkpoint.opening import check_readable, read_common_and_references
from megackpt.engine.data.chunk_bytes import ReadBuffers, parts_of
from megackpt.engine.data.read import read_chunk
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.strategy import SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT, ChunkTable
from megackpt.plans.planning import SavePlan, as_declarations, first_of_equal_chunks, with_sizes
from megackpt.plans.planning.assignment import split_long_chunks
from megackpt.plans.planning.save_plan import index_order, offsets_in_files
from megackpt.plans.validation import check_coverage
from megackpt.storage import Store, digest_of_parts

COPIED_BYTES = 16 * 1024 * 1024
"""The longest chunk that a copy writes, unless a block of the source is longer. Some formats assemble a chunk
in memory, or begin a file with each chunk."""


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """The source of a copy on one rank.

    Nothing is resharded: the chunks of the source become those of the new checkpoint; long chunks are cut
    into blocks of rows.

    Attributes:
        stored: the opened source, as the new format takes its common state.
        contents: the same without the arrays that the new format stores as tensors of common state.
        chunks: all of its chunks.
        plan: which rank writes which chunk, or which part of a long chunk, `[n]`. The entity of a row is the
            row of its chunk in the source.
        start: position of each row of the plan in its chunk of the source, in bytes, `[n]`.
        blobs: this rank's objects, encoded for the new format, by row of the plan.
    """

    stored: Contents
    contents: Contents
    chunks: Chunks
    plan: SavePlan
    start: Ints
    blobs: Mapping[int, bytes]

    @classmethod
    def of(
        cls, stored: Contents, store: Store, strategy: SaveStrategy, *, rank: int, ranks: int
    ) -> SourceCheckpoint:
        """Plan the copies of all ranks, and encode this rank's objects. Local.

        Raises:
            FormatError: an array, an object or the common state cannot be loaded.
            CoverageError: the checkpoint is incomplete.
            UnserializableError: the new format cannot store an object.
        """
        contents = stored
        if not strategy.capabilities.refers_to_arrays:
            if stored.keeps_referenced_arrays:  # they are then loaded by their keys alone
                contents = stored = without_references(stored, where=store.location)
            else:
                contents = without_referenced(stored, store)
        check_readable(contents.unreadable, contents.unreadable, where=store.location)
        chunks = contents.chunks(sorted(contents.arrays))
        copies = plan_copy(chunks.table, chunks.position, ranks=ranks, block_bytes=chunks.block_bytes)
        plan = replace(copies.plan, table=_without_other_arrays(copies.plan.table, contents.arrays))
        check_coverage(as_declarations(plan))
        blobs = {}
        for row in plan.rows_of(rank).tolist():
            spec = plan.table.arrays[int(plan.table.array[row])]
            if spec.dtype == OBJECT:
                data = read_chunk(chunks, int(plan.entity[row]))
                value = contents.decode_object(data, f"{store.location}: object {spec.key!r}")
                blobs[row] = strategy.encode_object(value, path=spec.key)
        return cls(stored, contents, chunks, plan, copies.start, blobs)

    def identity(self) -> str:
        """Return what is equal on all ranks that have opened one source, and copy each chunk of it once."""
        columns = (self.plan.writer, self.plan.entity, self.start)
        digest = digest_of_parts([memoryview(column.tobytes()) for column in columns])
        return f"{self.contents.identity} {digest}"

    def with_object_sizes(self, sizes: Mapping[int, int]) -> SourceCheckpoint:
        """Return the same with the encoded sizes of all ranks' objects in the plan, by row, in bytes."""
        nbytes = self.plan.table.nbytes.copy()
        for row, size in sizes.items():
            nbytes[row] = size
        return replace(self, plan=with_sizes(self.plan, nbytes))

    def parts(self, row: int, buffer_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts to read of a row that is no object: row, and range of bytes in its chunk."""
        start = int(self.start[row])
        stop = start + int(self.plan.table.nbytes[row])
        entity = int(self.plan.entity[row])
        for low, high in parts_of(self.chunks, entity, start=start, stop=stop, buffer_bytes=buffer_bytes):
            yield row, low, high

    def read(self, row: int, buffers: ReadBuffers, buffer_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a row of the plan in parts, each valid until the next."""
        if row in self.blobs:
            blob = memoryview(self.blobs[row])
            yield from (blob[at : at + buffer_bytes] for at in range(0, len(blob), buffer_bytes))
            return
        start = int(self.start[row])
        yield from buffers.parts(
            self.chunks,
            int(self.plan.entity[row]),
            start=start,
            stop=start + int(self.plan.table.nbytes[row]),
            buffer_bytes=buffer_bytes,
        )


def check_unchanged(changed: Callable[[], str | None], store: Store) -> None:
    """Check that no file is another one than when it was read first; changed is of `Store.watch`.

    Raises:
        IntegrityError: a file has changed.
    """
    name = changed()
    if name is not None:
        raise IntegrityError(
            f"{store.location}/{name} changed while it was read, so what was read may be of two states. Wait "
            f"until nothing writes there, and start again.",
            path=f"{store.location}/{name}",
        )


def read_common_for(strategy: SaveStrategy, contents: Contents, store: Store) -> tuple[Any, Any]:
    """Return common state and content metadata as a format stores them. Local.

    A format that cannot refer to arrays stores them as tensors of common state. These are read into memory,
    as in a save.
    """
    if strategy.capabilities.refers_to_arrays:
        return read_common_and_references(contents, where=store.location)
    return read_whole_common(contents, store)


def _without_other_arrays(table: ChunkTable, keys: Container[str]) -> ChunkTable:
    """Return a chunk table without the arrays that have no chunks in it.

    A format may list all arrays of a file even if the table has chunks of only a few.
    """
    is_kept = np.array([spec.key in keys for spec in table.arrays], np.bool_)
    if is_kept.all():
        return table
    new_numbers = np.cumsum(is_kept) - 1
    arrays = tuple(spec for spec in table.arrays if spec.key in keys)
    return replace(table, arrays=arrays, array=new_numbers[table.array])


# The plan of writing the chunks of a checkpoint once more. Pure.


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Chunks to be written from the chunks of another checkpoint.

    Attributes:
        plan: the chunks; `entity` is the row of the stored chunk that each is a part of.
        start: where each begins in the stored chunk, in bytes, `[n]`.
    """

    plan: SavePlan
    start: Ints


def plan_copy(stored: ChunkTable, position: Ints, *, ranks: int, block_bytes: int = 1) -> CopyPlan:
    """Plan to write the chunks of a checkpoint once more: long ones split, of equal ones the first.

    Args:
        stored: the chunks.
        position: one number for each chunk, in whose order reading is cheap, `[n]`.
        ranks: number of ranks. Each gets neighbouring chunks of about equal bytes: at most its share and one
            chunk.
        block_bytes: length of the blocks in which the source is read.
    """
    rows = index_order(stored)
    rows = rows[first_of_equal_chunks(stored.take(rows))]
    rows = rows[stored.nbytes[rows] > 0]
    table, of, start = split_long_chunks(stored.take(rows), most=max(COPIED_BYTES, min(block_bytes, 2**40)))
    sorted_rows = index_order(table)
    # Splitting does not keep the order, and an index has to be sorted.
    table, of, start = table.take(sorted_rows), of[sorted_rows], start[sorted_rows]
    rows = rows[of]
    # A chunk goes to the rank in whose equal share of all bytes, in reading order, its middle lies.
    order = np.lexsort((start, position[rows]))
    ends = np.cumsum(table.nbytes[order])
    middle = ends - table.nbytes[order] / 2
    writer = np.empty(len(rows), np.int64)
    writer[order] = (middle * ranks / max(1, int(table.nbytes.sum()))).astype(np.int64)
    return CopyPlan(SavePlan(table, writer, rows, offsets_in_files(table, writer)), start)
