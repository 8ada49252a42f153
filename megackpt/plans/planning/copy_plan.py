"""The plan of writing the chunks of a checkpoint once more. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable
from megackpt.plans.planning.assignment import split_long_chunks
from megackpt.plans.planning.save_plan import SavePlan, first_of_equal_chunks, index_order, offsets_in_files

COPIED_BYTES = 16 * 1024 * 1024
"""The longest chunk that a copy writes, unless a block of the source is longer. Some formats assemble a chunk
in memory, or begin a file with each chunk."""


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
