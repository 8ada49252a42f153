"""Chunks told by the smallest boxes around them.

Owns that change of description. A flat range of a large box, as shards of a distributed optimizer are, lies
in a few of its rows, and is a flat range of the box of these rows as well. By their own boxes all shards of a
parameter meet each other; by the boxes of their rows only those do that may have an element in common.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.geometry import Ints, strides_of
from megackpt.metadata import ChunkTable


def with_bounding_boxes(table: ChunkTable) -> ChunkTable:
    """Return the same chunks, elements and their order, each as a flat range of the smallest box around it.

    Rows stay where they are, so they may no longer be sorted by start; see `sorted_for_search`.
    """
    strides = strides_of(table.shape)
    low = table.flat_start
    last = np.maximum(table.flat_stop - 1, low)  # an empty chunk is told by where it would begin
    extents = np.maximum(table.shape, 1)
    first_index = low[:, None] // np.maximum(strides, 1) % extents
    last_index = last[:, None] // np.maximum(strides, 1) % extents
    start, shape = table.start.copy(), table.shape.copy()
    before = np.zeros(len(table), np.int64)  # elements of the old box before the first of the new one
    is_one_row = np.ones(len(table), np.bool_)  # whether all elements agree in the dims so far
    is_empty = table.flat_stop <= low
    for d in range(table.dims):
        begin = np.where(is_one_row & ~is_empty, first_index[:, d], 0)
        extent = np.where(is_one_row & ~is_empty, last_index[:, d] - first_index[:, d] + 1, table.shape[:, d])
        start[:, d] += begin
        shape[:, d] = extent
        before += begin * strides[:, d]
        is_one_row &= first_index[:, d] == last_index[:, d]
    return replace(
        table, start=start, shape=shape, flat_start=low - before, flat_stop=table.flat_stop - before
    )


def sorted_for_search(table: ChunkTable) -> Ints:
    """Return rows in the order by array and first start, in which `plan_load` looks for chunks."""
    return np.lexsort((table.flat_start, table.start[:, 0], table.array))
