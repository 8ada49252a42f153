"""The planner, run for jobs that are not there.

Owns every call of the planner that a simulation makes, and how long each takes, in CPU time: what else the
machine does is not the planner's. What goes in is made elsewhere, and what comes out is counted elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.formats.index_file import write_index
from megackpt.formats.native import names
from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable, DeclaredChunks, StoredChunks, block_counts
from megackpt.planning import Copies, SavePlan, plan_load, plan_save
from megackpt.planning.bounding import sorted_for_search, with_bounding_boxes
from megackpt.planning.load_plan import overlapping_chunks
from megackpt.storage import MemoryStore
from megackpt.validation import check_coverage

_ATTEMPT = "0" * 16  # names of files are as long as real ones


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The stored chunks that meet what some ranks hold together: the rows of an index that they need.

    Attributes:
        rows: rows of the whole table, in the order of `table`.
        table: the chunks, told by the boxes around them.
        seconds: how long it took to find them.
    """

    rows: Ints
    table: ChunkTable
    seconds: float


def plan_part(declared: DeclaredChunks, *, ranks: int) -> tuple[SavePlan, float]:
    """Plan the save of ranks that share no chunk with others; return the plan and how long that took, in s.

    What others hold has no influence on it, so the plans of all parts together are the plan of the job.
    """
    began = time.thread_time()
    plan = plan_save(declared, ranks=ranks)
    return plan, time.thread_time() - began


def prove(mains: DeclaredChunks) -> float:
    """Prove that main replicas cover everything once; return how long that took, in s.

    Raises:
        CoverageError: they do not.
    """
    began = time.thread_time()
    check_coverage(mains)
    return time.thread_time() - began


def merge_plans(plans: Sequence[SavePlan]) -> SavePlan:
    """Put the plans of parts, which have one list of arrays, into one in the order of an index."""
    columns = ("array", "start", "shape", "flat_start", "flat_stop", "nbytes")
    table = ChunkTable(
        plans[0].table.arrays, *(np.concatenate([getattr(p.table, c) for p in plans]) for c in columns)
    )
    order = np.lexsort((table.flat_stop, table.flat_start, table.extents(), table.places()))
    writer, slot, offset = (
        np.concatenate([getattr(p, c) for p in plans])[order] for c in ("writer", "slot", "offset_bytes")
    )
    return SavePlan(table.take(order), writer, slot, offset)


def build_index(plan: SavePlan, *, world: int) -> tuple[int, float]:
    """Write the index of a checkpoint to memory; return its size in bytes and how long that took, in s.

    Digests are zeros: they take the same place whatever they are.
    """
    began = time.thread_time()
    writers = np.unique(plan.writer)
    file_of = np.zeros(world, np.int64)
    file_of[writers] = np.arange(len(writers))
    blocks = block_counts(plan.table.nbytes)
    stored = StoredChunks(
        table=plan.table,
        file=file_of[plan.writer],
        offset_bytes=plan.offset_bytes,
        digest_start=np.cumsum(blocks) - blocks,
        digests=np.zeros(int(blocks.sum()), np.uint64),
        files=tuple(names.data_file(_ATTEMPT, rank) for rank in writers.tolist()),
    )
    entry = write_index(MemoryStore(), names.index_file(_ATTEMPT), stored)
    return int(entry["nbytes"]), time.thread_time() - began


def region_of(boxes: ChunkTable, stored: ChunkTable) -> Region:
    """Find the stored chunks that meet boxes; stored is sorted as in an index."""
    began = time.thread_time()
    rows = np.unique(overlapping_chunks(boxes, stored)[1])
    table = with_bounding_boxes(stored.take(rows))
    order = sorted_for_search(table)
    return Region(rows[order], table.take(order), time.thread_time() - began)


def plan_rank(requested: DeclaredChunks, region: Region, *, where: str) -> tuple[Copies, float]:
    """Plan the load of one rank; return it, with rows of the region, and how long that took, in s.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    began = time.thread_time()
    told = replace(requested, table=with_bounding_boxes(requested.table))
    copies = plan_load(told, region.table, where=where)
    return copies, time.thread_time() - began
