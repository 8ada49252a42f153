"""The save plan: which rank writes which chunk, and at which offset of its file.

Pure and deterministic: equal declarations give equal plans. Rank 0 plans, and sends each rank its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megackpt.options import Spread
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, MergedDeclarations
from megackpt.plans.metadata.chunk_table import Rows
from megackpt.plans.planning.assignment import assign_writers, split_long_chunks


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Chunks to be written, each once, in index order.

    A plan follows from the structure of the state. The sizes of objects change from save to save, so those
    in the plan are the ones that were declared when it was made. `with_object_sizes` sets those of a save.

    Attributes:
        table: the chunks, sorted by array, start and flat range; empty ones are left out.
        writer: the rank that writes each, `[n]`.
        entity: index of the chunk's entity on that rank, `[n]`.
        offset_bytes: offset of the chunk in the data of the writer's file, `[n]`.
    """

    table: ChunkTable
    writer: Ints
    entity: Ints
    offset_bytes: Ints

    def rows_of(self, rank: int) -> Ints:
        """Return the rows that a rank writes, in the order of its file."""
        rows = np.flatnonzero(self.writer == rank)
        return rows[np.argsort(self.offset_bytes[rows], kind="stable")]


PART_BYTES = 8 * 1024 * 1024
"""A chunk that several ranks can write is not split into shorter chunks than this to balance the ranks."""


def plan_save(
    declared: DeclaredChunks,
    *,
    ranks: int,
    spread: Spread = "world",
    labels: Ints | None = None,
    part_bytes: int | None = PART_BYTES,
) -> SavePlan:
    """Plan a save from declarations with one owner each, in the order of ranks; see `plan_merged_save`."""
    merged = MergedDeclarations.of_single_owners(declared, ranks=ranks)
    return plan_merged_save(merged, spread=spread, labels=labels, part_bytes=part_bytes)


def plan_merged_save(
    merged: MergedDeclarations,
    *,
    spread: Spread = "world",
    labels: Ints | None = None,
    part_bytes: int | None = PART_BYTES,
) -> SavePlan:
    """Choose for each chunk the rank that writes it, and its offset in the file of that rank.

    Chunks of arrays with several owners are spread over them by bytes. Objects are written by their main
    replica, as copies of an object need not encode to equal bytes. In a file wider dtypes come first, so that
    every chunk is aligned to its element size.

    Args:
        merged: the declarations of all ranks.
        spread: over all owners of a chunk ("world"), over the owners with the label of its main replica
            ("group"), or not at all ("none": the main replica writes).
        labels: a number for each rank, for "group", `[ranks]`.
        part_bytes: chunks with several owners are split along their outermost dims into at most so many
            bytes, or 1/32 of what a rank writes if that is more; None leaves them whole.
    """
    # Leave out empty chunks, and replicas that must not write.
    declared = merged.declared
    may_write = declared.main | (~declared.table.are_objects() & (spread != "none"))
    candidates = may_write & (declared.table.nbytes > 0)
    merged = _saved_chunks(merged if candidates.all() else merged.take(candidates))
    # Rows are in index order now, so the rows of one chunk are neighbours; each chunk is known by its first
    # row.
    table = merged.declared.table
    first = first_of_equal_chunks(table)
    chunk_of = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(table))))
    # One pair (row, rank) for each owner of each row: the candidates, sorted by chunk and rank.
    row, rank = merged.owners()
    if spread == "group" and labels is not None:
        kept = _has_label_of_main(merged, chunk_of[row], row, rank, labels)
        row, rank = row[kept], rank[kept]
    row, rank = _by_chunk_and_rank(chunk_of[row], row, rank, merged.ranks)
    owners = np.bincount(chunk_of[row], minlength=len(first))
    starts = np.append(0, np.cumsum(owners))
    # Chunks that several ranks can write are split, so that no single chunk unbalances the ranks.
    parts, of = table.take(first), np.arange(len(first))
    if part_bytes is not None:
        share = int(parts.nbytes.sum()) // merged.ranks
        parts, of, _ = split_long_chunks(parts, most=max(part_bytes, share // 32), only=owners > 1)
        order = index_order(parts)
        parts, of = parts.take(order), of[order]
    choice = assign_writers(parts.nbytes, starts, rank, ranks=merged.ranks, set_of=of)
    writer = rank[choice]
    return SavePlan(parts, writer, merged.entities_of(row[choice], writer), offsets_in_files(parts, writer))


def _saved_chunks(merged: MergedDeclarations) -> MergedDeclarations:
    """Sort rows into index order, and leave out chunks that have no main replica."""
    merged = merged.take(index_order(merged.declared.table))
    first = first_of_equal_chunks(merged.declared.table)
    if not len(first):
        return merged
    # `reduceat` takes the rows from one chunk's first row to that of the next, as `first` ascends.
    has_main = np.logical_or.reduceat(merged.declared.main, first)
    if has_main.all():
        return merged
    return merged.take(np.repeat(has_main, np.diff(np.append(first, len(merged.declared)))))


def _by_chunk_and_rank(chunk: Ints, row: Ints, rank: Ints, ranks: int) -> tuple[Ints, Ints]:
    # One number for each pair, so that the usual case, which is sorted already, is found without a sort.
    key = chunk * ranks + rank
    if np.all(key[1:] >= key[:-1]):
        return row, rank
    order = np.argsort(key, kind="stable")
    return row[order], rank[order]


def _has_label_of_main(merged: MergedDeclarations, chunk: Ints, row: Ints, rank: Ints, labels: Ints) -> Rows:
    """Return which pairs (row, rank) have the label of a rank with the chunk's main replica."""
    _, label = np.unique(labels, return_inverse=True)
    key = chunk * len(labels) + label.reshape(-1)[rank]  # one number for each chunk and label
    return np.isin(key, key[merged.declared.main[row]])


def plan_main_replicas(declared: DeclaredChunks) -> SavePlan:
    """Let every rank write its own main replicas, so that it can plan from its own declarations alone.

    For ranks that do not exchange declarations before they write. Nothing is spread, and a chunk with two
    main replicas is written twice.
    """
    mains = declared.take(declared.main & (declared.table.nbytes > 0))
    mains = mains.take(index_order(mains.table))
    return SavePlan(mains.table, mains.rank, mains.entity, offsets_in_files(mains.table, mains.rank))


def with_sizes(plan: SavePlan, nbytes: Ints) -> SavePlan:
    """Return the plan with chunks of other lengths, `[n]`; the writers stay."""
    table = replace(plan.table, nbytes=nbytes)
    return replace(plan, table=table, offset_bytes=offsets_in_files(table, plan.writer))


def with_object_sizes(plan: SavePlan, sizes: Mapping[int, Ints]) -> SavePlan:
    """Return the plan for objects of other sizes.

    Args:
        plan: who writes what.
        sizes: sizes of the objects that some ranks write, by rank, each in the order of rows. The offsets in
            the files of these ranks change with them.
    """
    ranks = sorted(rank for rank, of_rank in sizes.items() if len(of_rank))
    if not ranks:
        return plan
    # The rows that these ranks write, and the objects among them.
    has_sizes = np.zeros(int(plan.writer.max()) + 1, np.bool_)
    has_sizes[ranks] = True
    rows = np.flatnonzero(has_sizes[plan.writer])
    objects = rows[plan.table.are_objects()[rows]]
    # Sorted by rank. The sort is stable, so the objects of each rank stay in the order of rows.
    objects = objects[np.argsort(plan.writer[objects], kind="stable")]
    nbytes = plan.table.nbytes.copy()
    nbytes[objects] = np.concatenate([sizes[rank] for rank in ranks])
    if len(rows) == len(plan.table):
        return with_sizes(plan, nbytes)
    table, offset_bytes = replace(plan.table, nbytes=nbytes), plan.offset_bytes.copy()
    offset_bytes[rows] = offsets_in_files(table.take(rows), plan.writer[rows])
    return replace(plan, table=table, offset_bytes=offset_bytes)


def as_declarations(plan: SavePlan) -> DeclaredChunks:
    """Return the rows of a plan as if the rank that writes each declared it as the main replica."""
    rows = len(plan.table)
    yes, no = np.ones(rows, np.bool_), np.zeros(rows, np.bool_)
    return DeclaredChunks(plan.table, yes, no, plan.writer, plan.entity)


def index_order(table: ChunkTable) -> Ints:
    """Return the order by array, start, shape and flat range; replicas keep the order of ranks."""
    # The last key decides first. The sort is stable, so equal rows stay as they were merged: by rank.
    return np.lexsort((table.flat_stop, table.flat_start, table.shape_keys(), table.start_keys()))


def first_of_equal_chunks(table: ChunkTable) -> Ints:
    """Return the rows, in index order, at which a new chunk begins; rows up to the next are its replicas."""
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


def offsets_in_files(table: ChunkTable, writer: Ints) -> Ints:
    """Return the offset of each chunk in its writer's file, where wider elements come first, `[n]`."""
    # With wider elements first, every chunk begins at a multiple of its item size, as views need it.
    order = np.lexsort((-table.widths(), writer))
    nbytes = table.nbytes[order]
    # Sums over all files, minus what they were where the chunk's file began.
    ends = np.cumsum(nbytes)
    new_file = np.diff(writer[order], prepend=-1) != 0
    base = np.maximum.accumulate(np.where(new_file, ends - nbytes, 0)) if len(table) else ends
    offsets = np.empty(len(table), np.int64)
    offsets[order] = ends - nbytes - base
    return offsets


def pack_rows(plan: SavePlan, *, ranks: int) -> list[bytes]:
    """Return for each rank the rows that it writes, encoded for `unpack_rows`."""
    table = plan.table
    # Stable: `unpack_rows` computes offsets in the file, which depend on the order of a writer's rows.
    order = np.argsort(plan.writer, kind="stable")
    matrix = np.column_stack(
        (plan.entity, table.flat_start, table.flat_stop, table.nbytes, table.start, table.shape)
    )[order]
    ends = np.cumsum(np.bincount(plan.writer, minlength=ranks)).tolist()
    head = np.array([table.dims], np.int64).tobytes()
    return [head + matrix[start:end].tobytes() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def unpack_rows(packed: bytes, declared: DeclaredChunks, entities: Ints, *, rank: int) -> SavePlan:
    """Return the rows of a plan that one rank writes, in the order of the plan.

    Args:
        packed: as `pack_rows` returns it for this rank.
        declared: the declarations of this rank, which give each row its array.
        entities: the entity of each declared row as it was packed; see `PackedDeclarations`.
        rank: number of this rank.
    """
    dims = int(np.frombuffer(packed, np.int64, 1)[0])
    matrix = np.frombuffer(packed, np.int64, offset=8).reshape(-1, 4 + 2 * dims)
    # A row's array is not sent: it follows from the entity, which the rank has declared itself.
    entity = entities[matrix[:, 0]]
    own = declared.table.dims  # the arrays of other ranks may have more dims
    table = ChunkTable(
        declared.table.arrays,
        declared.table.array[entity],
        matrix[:, 4 : 4 + own],
        matrix[:, 4 + dims : 4 + dims + own],
        *matrix[:, 1:4].T,
    )
    writer = np.full(len(table), rank, np.int64)
    return SavePlan(table, writer, entity, offsets_in_files(table, writer))
