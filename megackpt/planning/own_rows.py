"""The rows of a plan that one rank carries out, as they travel to it.

Owns their encoding, and how a rank makes a plan of them and what it has declared. Pure.
"""

from __future__ import annotations

import numpy as np

from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable, DeclaredChunks
from megackpt.planning.save_plan import SavePlan, place_in_files


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
