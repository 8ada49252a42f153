"""Runs the planner for simulated jobs.

Every call of the planner by a simulation is here, with its CPU time, which does not depend on other work of
the machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.comm import SingleProcess
from megackpt.entities import ShardedLayout
from megackpt.formats.native import names
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    ChunkTable,
    DeclaredChunks,
    PackedDeclarations,
    block_counts,
    merge_packed_declarations,
    pack_columns,
    pack_declarations,
)
from megackpt.plans.planning import Copies, SavePlan, pack_rows, plan_load, plan_merged_save, unpack_rows
from megackpt.plans.planning.load_plan import (
    StoredPositions,
    overlapping_chunks,
    search_order,
    with_bounding_boxes,
)
from megackpt.plans.validation import check_coverage
from megackpt.run import PlanCache
from megackpt.run.collective import save
from megackpt.storage import MemoryStore, digest_of

_ATTEMPT = "0" * 16  # names of files are as long as real ones


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The stored chunks that overlap what some ranks need: their rows of an index.

    Attributes:
        rows: rows of the whole table, in the order of `table`.
        table: the chunks, each as a flat range of the smallest box around it.
        seconds: how long it took to find them.
    """

    rows: Ints
    table: ChunkTable
    seconds: float


def list_of(declared: DeclaredChunks) -> tuple[PackedDeclarations, bytes, float]:
    """Pack what one rank sends; return it, the digest of its shared list, and how long that took."""
    began = time.thread_time()
    lists = pack_declarations(declared, replicated=frozenset(), on_some_ranks=frozenset())
    digest = bytes.fromhex(digest_of(lists.replica_rows))
    return lists, digest, time.thread_time() - began


def seconds_per_chunk() -> float:
    """Return what a save takes for each chunk that a rank declares, apart from planning and bytes; in s.

    Measured with a small state: a save to memory with the plan of an earlier one. It describes the state,
    compares it, and handles each chunk. Chunks are those of fused weights, which take the longest.
    """
    pairs = {f"w{i}": ShardedLayout.split(f"w{i}", torch.zeros(4), 0, {"a": 2, "b": 2}) for i in range(64)}
    store, plans = MemoryStore(), PlanCache()
    spent = []
    for _ in range(6):  # the first one plans
        began = time.thread_time()
        save(pairs, store, group=SingleProcess(), plans=plans)
        spent.append(time.thread_time() - began)
    return min(spent[1:]) / (2 * len(pairs))


def plan_all(
    main_lists: Sequence[bytes], shared: Sequence[bytes], owner_groups: Sequence[Ints]
) -> tuple[SavePlan, list[bytes], dict[str, float]]:
    """Do what rank 0 does: merge the lists of all ranks, prove coverage, plan, and pack the rows of each.

    shared has the lists that are equal on several ranks, and owner_groups the ranks of each. The last result
    is how long the steps took, by the names of `SaveOutcome`.

    Raises:
        CoverageError: main replicas do not cover everything once.
    """
    clock = _Clock()
    merged, _ = merge_packed_declarations(main_lists, shared, owner_groups)
    times = {"merge_s": clock.lap()}
    check_coverage(merged.declared)
    times["prove_s"] = clock.lap()
    plan = plan_merged_save(merged)
    times["plan_s"] = clock.lap()
    rows = pack_rows(plan, ranks=len(main_lists))
    times["pack_s"] = clock.lap()
    return plan, rows, times


def take_rows(
    rows: bytes, declared: DeclaredChunks, lists: PackedDeclarations, *, rank: int
) -> tuple[SavePlan, float]:
    """Make one rank's plan of the rows that it is sent; return it and how long that took."""
    began = time.thread_time()
    plan = unpack_rows(rows, declared, lists.entities, rank=rank)
    return plan, time.thread_time() - began


def build_index(plan: SavePlan, *, world: int) -> tuple[int, float]:
    """Write the index to memory as rank 0 does; return its size in bytes and how long that took.

    Digests are zeros: they take the same space whatever they are.
    """
    store, blocks = MemoryStore(), np.zeros(world, np.int64)
    np.add.at(blocks, plan.writer, block_counts(plan.table.nbytes))
    start = np.zeros(1, np.int64)
    receipts = []
    for rank, count in enumerate(blocks.tolist()):
        receipts.append([pack_columns({"data_start": start, "digests": np.zeros(count, np.uint64)})])
        if count:
            store.write(names.data_file(_ATTEMPT, rank), b"")
    began = time.thread_time()
    fields = NativeSaveStrategy().write_index(store, attempt=_ATTEMPT, plan=plan, receipts=receipts)
    return int(fields["index"]["nbytes"]), time.thread_time() - began


def region_of(boxes: ChunkTable, stored: ChunkTable, positions: StoredPositions) -> Region:
    """Find the stored chunks that overlap boxes. stored is sorted as in an index, with positions."""
    began = time.thread_time()
    overlaps = np.zeros(len(stored), np.bool_)
    overlaps[overlapping_chunks(boxes, stored, positions)[1]] = True
    rows = np.flatnonzero(overlaps)
    table = with_bounding_boxes(stored.take(rows))
    order = search_order(table)
    return Region(rows[order], table.take(order), time.thread_time() - began)


def plan_rank(requested: DeclaredChunks, region: Region, *, where: str) -> tuple[Copies, float]:
    """Plan the load of one rank; return it, with rows of the region, and how long that took, in s.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    began = time.thread_time()
    declared = replace(requested, table=with_bounding_boxes(requested.table))
    copies = plan_load(declared, region.table, where=where)
    return copies, time.thread_time() - began


class _Clock:
    def __init__(self) -> None:
        self._at = time.thread_time()

    def lap(self) -> float:
        before, self._at = self._at, time.thread_time()
        return self._at - before
