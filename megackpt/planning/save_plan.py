"""The save plan: which rank writes which chunk, in which file, at which place.

Pure: the merged declarations of all ranks in, the same plan on every rank out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megackpt.geometry import Ints
from megackpt.metadata import OBJECT, ChunkTable, DeclaredChunks, MergedDeclarations, itemsizes
from megackpt.metadata.chunk_table import Rows
from megackpt.options import Spread
from megackpt.planning.assignment import assign_writers
from megackpt.planning.long_chunks import split_long_chunks


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Every chunk to be written once, in index order.

    Attributes:
        table: the chunks, sorted by array, start and flat range; empty ones are left out.
        writer: the rank that writes each, `[n]`.
        entity: position of the chunk in that rank's own entities, `[n]`.
        offset_bytes: where it begins in the data of the writer's file, `[n]`.
    """

    table: ChunkTable
    writer: Ints
    entity: Ints
    offset_bytes: Ints

    def rows_of(self, rank: int) -> Ints:
        """Rows that a rank writes, in the order they have in its file."""
        rows = np.flatnonzero(self.writer == rank)
        return rows[np.argsort(self.offset_bytes[rows], kind="stable")]


PART_BYTES = 8 * 1024 * 1024
"""Parts of a chunk that several ranks write are not made smaller for the sake of balance."""


def plan_save(
    declared: DeclaredChunks,
    *,
    ranks: int,
    spread: Spread = "world",
    labels: Ints | None = None,
    part_bytes: int | None = PART_BYTES,
) -> SavePlan:
    """Decide who writes what of rows in the order of ranks, each of one holder; see `plan_merged_save`."""
    held = MergedDeclarations.of_single_owners(declared, ranks=ranks)
    return plan_merged_save(held, spread=spread, labels=labels, part_bytes=part_bytes)


def plan_merged_save(
    held: MergedDeclarations,
    *,
    spread: Spread = "world",
    labels: Ints | None = None,
    part_bytes: int | None = PART_BYTES,
) -> SavePlan:
    """Decide who writes what, and where.

    Chunks that several ranks hold are spread over them by bytes; with spread "group" over those of them whose
    label, a number for each rank, is that of the main replica. Long ones are cut along their outermost dims,
    into parts of at most part_bytes or 1/32 of what a rank writes, whichever is more; None leaves them whole.
    Objects are written by their main replica, as copies of an object need not encode to equal bytes. In a
    file, wider dtypes come first, so that every chunk is aligned to its own element size.
    """
    declared = held.declared
    is_object = np.array([a.dtype == OBJECT for a in declared.table.arrays], np.bool_)
    candidates = declared.table.nbytes > 0
    if len(is_object):
        may_spread = ~is_object[declared.table.array] & (spread != "none")
        candidates &= declared.main | may_spread
    held = _with_mains(held if candidates.all() else held.take(candidates))
    table = held.declared.table
    first = first_of_equal_chunks(table)
    chunk_of = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(table))))
    row, rank = held.owners()
    if spread == "group" and labels is not None:
        kept = _beside_a_main_replica(held, chunk_of[row], row, rank, labels)
        row, rank = row[kept], rank[kept]
    row, rank = _by_chunk_and_rank(chunk_of[row], row, rank, held.ranks)
    holders = np.bincount(chunk_of[row], minlength=len(first))
    starts = np.append(0, np.cumsum(holders))
    parts, of = table.take(first), np.arange(len(first))
    if part_bytes is not None:
        share = int(parts.nbytes.sum()) // held.ranks
        parts, of, _ = split_long_chunks(parts, most=max(part_bytes, share // 32), only=holders > 1)
        order = _index_order(parts)
        parts, of = parts.take(order), of[order]
    choice = assign_writers(parts.nbytes, starts, rank, ranks=held.ranks, set_of=of)
    writer = rank[choice]
    return SavePlan(parts, writer, held.entities_of(row[choice], writer), place_in_files(parts, writer))


def _with_mains(held: MergedDeclarations) -> MergedDeclarations:
    """Sort rows into index order, and leave out the chunks of which nobody has the main replica."""
    held = held.take(_index_order(held.declared.table))
    first = first_of_equal_chunks(held.declared.table)
    if not len(first):
        return held
    has_main = np.logical_or.reduceat(held.declared.main, first)
    if has_main.all():
        return held
    return held.take(np.repeat(has_main, np.diff(np.append(first, len(held.declared)))))


def _by_chunk_and_rank(chunk: Ints, row: Ints, rank: Ints, ranks: int) -> tuple[Ints, Ints]:
    place = chunk * ranks + rank
    if np.all(place[1:] >= place[:-1]):
        return row, rank
    order = np.argsort(place, kind="stable")
    return row[order], rank[order]


def _beside_a_main_replica(
    held: MergedDeclarations, chunk: Ints, row: Ints, rank: Ints, labels: Ints
) -> Rows:
    """Choose the holders that have the label of a rank with the chunk's main replica."""
    _, label = np.unique(labels, return_inverse=True)
    place = chunk * len(labels) + label.reshape(-1)[rank]
    return np.isin(place, place[held.declared.main[row]])


def plan_main_replicas(declared: DeclaredChunks) -> SavePlan:
    """Let every rank write its own main replicas: its part of the plan follows from its own declarations.

    For ranks that do not exchange them before they write. Nothing is spread, and a chunk with two main
    replicas is written twice.
    """
    mains = declared.take(declared.main & (declared.table.nbytes > 0))
    mains = mains.take(_index_order(mains.table))
    return SavePlan(mains.table, mains.rank, mains.entity, place_in_files(mains.table, mains.rank))


COPIED_BYTES = 16 * 1024 * 1024
"""A copy writes chunks of no more than this, unless a block that the source can read is larger: some formats
put a chunk together in memory, and cut arrays into files where chunks are cut."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Chunks to be written as parts of those that a checkpoint has.

    Attributes:
        plan: who writes which; the entity of each is the row of the stored chunk.
        start: where it begins in the stored chunk, in bytes, `[n]`.
    """

    plan: SavePlan
    start: Ints


def plan_copy(stored: ChunkTable, place: Ints, *, ranks: int, block_bytes: int = 1) -> CopyPlan:
    """Plan to write the chunks that a checkpoint has, as they are cut there; long ones cut into rows.

    Each rank gets a run of them in the order of place, in which reading is cheap, of about equal bytes: no
    rank has more than its share and one chunk. Of equal chunks one is written.
    """
    rows = _index_order(stored)
    rows = rows[first_of_equal_chunks(stored.take(rows))]
    rows = rows[stored.nbytes[rows] > 0]
    table, of, start = split_long_chunks(stored.take(rows), most=max(COPIED_BYTES, min(block_bytes, 2**40)))
    sorted_rows = _index_order(table)
    table, of, start = table.take(sorted_rows), of[sorted_rows], start[sorted_rows]
    rows = rows[of]
    order = np.lexsort((start, place[rows]))
    ends = np.cumsum(table.nbytes[order])
    middle = ends - table.nbytes[order] / 2
    writer = np.empty(len(rows), np.int64)
    writer[order] = (middle * ranks / max(1, int(table.nbytes.sum()))).astype(np.int64)
    return CopyPlan(SavePlan(table, writer, rows, place_in_files(table, writer)), start)


def with_sizes(plan: SavePlan, nbytes: Ints) -> SavePlan:
    """Return the plan with chunks of other lengths, `[n]`; who writes what stays."""
    table = replace(plan.table, nbytes=nbytes)
    return replace(plan, table=table, offset_bytes=place_in_files(table, plan.writer))


def object_sizes(plan: SavePlan) -> Ints:
    """Return the lengths of the objects in a plan, in bytes, in the order of ranks and then of rows."""
    return plan.table.nbytes[_objects(plan)]


def with_object_sizes(plan: SavePlan, sizes: Ints) -> SavePlan:
    """Return the plan for objects of other sizes, in the order of `object_sizes`.

    Who writes what stays: only places in files move.
    """
    if not len(sizes):
        return plan
    nbytes = plan.table.nbytes.copy()
    nbytes[_objects(plan)] = sizes
    return with_sizes(plan, nbytes)


def _objects(plan: SavePlan) -> Ints:
    is_object = np.array([a.dtype == OBJECT for a in plan.table.arrays], np.bool_)
    rows = np.flatnonzero(is_object[plan.table.array]) if len(is_object) else np.zeros(0, np.int64)
    return rows[np.argsort(plan.writer[rows], kind="stable")]


def _index_order(table: ChunkTable) -> Ints:
    """Sort by array, start, shape and flat range; copies keep the order of merged rows, that of ranks."""
    return np.lexsort((table.flat_stop, table.flat_start, table.shape_keys(), table.start_keys()))


def first_of_equal_chunks(table: ChunkTable) -> Ints:
    """Rows, in index order, at which a new chunk begins; the rows up to the next hold copies of it."""
    differs = np.ones(len(table), np.bool_)
    if len(table):
        differs[1:] = (
            (np.diff(table.array) != 0)
            | (np.diff(table.start, axis=0) != 0).any(axis=1)
            | (np.diff(table.shape, axis=0) != 0).any(axis=1)
            | (np.diff(table.flat_start) != 0)
            | (np.diff(table.flat_stop) != 0)
        )
    return np.flatnonzero(differs)


def place_in_files(table: ChunkTable, writer: Ints) -> Ints:
    """Place each writer's chunks one after the other, widest elements first."""
    width = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
    order = np.lexsort((-width, writer))
    nbytes = table.nbytes[order]
    ends = np.cumsum(nbytes)
    new_file = np.diff(writer[order], prepend=-1) != 0
    base = np.maximum.accumulate(np.where(new_file, ends - nbytes, 0)) if len(table) else ends
    offsets = np.empty(len(table), np.int64)
    offsets[order] = ends - nbytes - base
    return offsets


def pack_rows(plan: SavePlan, *, ranks: int) -> list[bytes]:
    """Return for each rank the rows that it writes, encoded."""
    table = plan.table
    order = np.argsort(plan.writer, kind="stable")
    matrix = np.column_stack(
        (plan.entity, table.flat_start, table.flat_stop, table.nbytes, table.start, table.shape)
    )[order]
    ends = np.cumsum(np.bincount(plan.writer, minlength=ranks)).tolist()
    head = np.array([table.dims], np.int64).tobytes()
    return [head + matrix[start:end].tobytes() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def unpack_rows(packed: bytes, declared: DeclaredChunks, entities: Ints, *, rank: int) -> SavePlan:
    """Return the plan of what one rank writes: the rows of the whole plan, in the same order.

    declared is what the rank has declared; entities translates the numbers that the rows carry.
    """
    dims = int(np.frombuffer(packed, np.int64, 1)[0])
    matrix = np.frombuffer(packed, np.int64, offset=8).reshape(-1, 4 + 2 * dims)
    entity = entities[matrix[:, 0]]
    own = declared.table.dims  # of the arrays that this rank declares; others may have more
    table = ChunkTable(
        declared.table.arrays,
        declared.table.array[entity],
        matrix[:, 4 : 4 + own],
        matrix[:, 4 + dims : 4 + dims + own],
        *matrix[:, 1:4].T,
    )
    writer = np.full(len(table), rank, np.int64)
    return SavePlan(table, writer, entity, place_in_files(table, writer))
