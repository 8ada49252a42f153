"""Which stored chunks may have elements in common with requested ones. Pure, over columns.

A search by dim 0 in the sorted stored chunks, then comparisons of boxes. The candidates may include pairs
without a common element; `load_plan` intersects them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges, position_bases, strides_of
from megackpt.plans.metadata import ChunkTable


@dataclass(frozen=True, slots=True, eq=False)
class StoredPositions:
    """Where n stored chunks of a arrays begin along dim 0, as one sorted column; see `position_bases`.

    Attributes:
        number: index of each array, by key.
        extent: the largest first start of a chunk of each array, `[a]`.
        reach: the largest extent along dim 0 of a chunk of each array, `[a]`.
        bases: position at which each array begins, `[a]`.
        bound: the largest difference of positions within one array.
        position: of each chunk, `[n]`, ascending.
    """

    number: Mapping[str, int]
    extent: Ints
    reach: Ints
    bases: Ints
    bound: int
    position: Ints

    @classmethod
    def of(cls, stored: ChunkTable) -> StoredPositions:
        """Compute the positions of chunks that are sorted by array and first start."""
        first = np.searchsorted(stored.array, np.arange(len(stored.arrays) + 1))
        counts = np.diff(first)
        has_chunks = np.flatnonzero(counts)
        reach, extent = np.zeros((2, len(stored.arrays)), np.int64)
        if has_chunks.size:
            reach[has_chunks] = np.maximum.reduceat(stored.shape[:, 0], first[has_chunks])
            # Chunks are sorted, so the last one of an array begins furthest.
            extent[has_chunks] = stored.start[first[has_chunks + 1] - 1, 0]
        bases, bound = position_bases(extent)
        position = np.repeat(bases, counts) + np.minimum(stored.start[:, 0], bound)
        number = {spec.key: i for i, spec in enumerate(stored.arrays)}
        return cls(number, extent, reach, bases, bound, position)

    def arrays_of(self, requested: ChunkTable) -> Ints:
        """Return the index of the stored array of each requested row, `[n]`."""
        return np.array([self.number[spec.key] for spec in requested.arrays], np.int64)[requested.array]

    def candidates(self, requested: ChunkTable) -> tuple[Ints, Ints]:
        """Return for each requested row the range of stored rows that may overlap it along dim 0."""
        array = self.arrays_of(requested)
        first = self.bases[array]
        # One past all positions of the array, and below those of the next one.
        beyond = np.minimum(self.extent, self.bound)[array] + 1
        # A chunk overlaps only if it begins before the request's end, and less than the longest extent before
        # the request's start.
        lowest = np.clip(requested.start[:, 0] - self.reach[array] + 1, 0, beyond)
        highest = np.minimum(requested.start[:, 0] + requested.shape[:, 0], beyond)
        low = np.searchsorted(self.position, first + lowest, side="left")
        return low, np.maximum(np.searchsorted(self.position, first + highest, side="left"), low)


def overlapping_chunks(
    requested: ChunkTable, stored: ChunkTable, positions: StoredPositions | None = None
) -> tuple[Ints, Ints]:
    """Return pairs (requested row, stored row) of the same array which may have an element in common, sorted.

    Both tables have the same number of dims.

    Args:
        requested: chunks whose arrays are among the stored ones.
        stored: chunks sorted by array and first start.
        positions: those of stored, for callers that ask more than once.
    """
    positions = positions or StoredPositions.of(stored)
    low, high = positions.candidates(requested)
    request, chunk = np.repeat(np.arange(len(low)), high - low), joined_ranges(low, high - low)
    # A damaged index may not be sorted, so a range may hold chunks of other arrays.
    is_same_array = stored.array[chunk] == positions.arrays_of(requested)[request]
    if not is_same_array.all():
        request, chunk = request[is_same_array], chunk[is_same_array]
    # Dim by dim, only the pairs whose boxes overlap so far are left.
    for d in range(requested.dims):
        a, b = requested.start[request, d], stored.start[chunk, d]
        overlaps = (a < b + stored.shape[chunk, d]) & (b < a + requested.shape[request, d])
        request, chunk = request[overlaps], chunk[overlaps]
    # Shards of a distributed optimizer are many flat ranges of one box, and few of them overlap. Their boxes
    # are equal, so the ranges decide, which is cheap.
    is_equal_box = np.ones(len(request), np.bool_)
    for d in range(requested.dims):
        is_equal_box &= requested.start[request, d] == stored.start[chunk, d]
        is_equal_box &= requested.shape[request, d] == stored.shape[chunk, d]
    overlaps = requested.flat_start[request] < stored.flat_stop[chunk]
    overlaps &= stored.flat_start[chunk] < requested.flat_stop[request]
    other_boxes = np.flatnonzero(~is_equal_box)
    overlaps[other_boxes] = _may_overlap(requested, request[other_boxes], stored, chunk[other_boxes])
    return request[overlaps], chunk[overlaps]


def _may_overlap(
    requested: ChunkTable, request: Ints, stored: ChunkTable, chunk: Ints
) -> npt.NDArray[np.bool_]:
    """Return which pairs of chunks in different but overlapping boxes may have an element in common."""
    # A requested whole box that encloses the stored box has all elements of the stored chunk.
    is_inside = np.ones(len(request), np.bool_)
    for d in range(requested.dims):
        first, begin = requested.start[request, d], stored.start[chunk, d]
        is_inside &= first <= begin
        is_inside &= begin + stored.shape[chunk, d] <= first + requested.shape[request, d]
    is_whole = (requested.flat_start == 0) & (requested.flat_stop == requested.shape.prod(axis=1))
    overlaps: npt.NDArray[np.bool_] = is_inside & is_whole[request]
    # For the rest, compare the smallest boxes around the flat ranges.
    rest = np.flatnonzero(~overlaps)
    a = with_bounding_boxes(requested.take(request[rest]))
    b = with_bounding_boxes(stored.take(chunk[rest]))
    boxes_overlap = ((a.start < b.start + b.shape) & (b.start < a.start + a.shape)).all(axis=1)
    are_equal = ((a.start == b.start) & (a.shape == b.shape)).all(axis=1)
    ranges_overlap = (a.flat_start < b.flat_stop) & (b.flat_start < a.flat_stop)
    overlaps[rest] = boxes_overlap & (~are_equal | ranges_overlap)
    return overlaps


def with_bounding_boxes(table: ChunkTable) -> ChunkTable:
    """Return the same chunks, each as a flat range of the smallest box around its elements.

    A flat range of a large box, such as a shard of a distributed optimizer, lies in a few rows of the box,
    and is a flat range of the box of these rows as well. By their declared boxes all shards of a parameter
    overlap; by the bounding boxes only those do that may have a common element. Rows stay in their order, so
    they may no longer be sorted by start; see `search_order`.
    """
    strides = strides_of(table.shape)
    low = table.flat_start
    last = np.maximum(table.flat_stop - 1, low)  # an empty chunk is described by where it would begin
    extents = np.maximum(table.shape, 1)
    first_index = low[:, None] // np.maximum(strides, 1) % extents
    last_index = last[:, None] // np.maximum(strides, 1) % extents
    start, shape = table.start.copy(), table.shape.copy()
    before = np.zeros(len(table), np.int64)  # elements of the declared box before the first of the new one
    # As long as the first and the last element agree in all outer dims, the range lies between their indices
    # in this dim. After the first dim that differs, a dim stays as wide as it was.
    is_one_row = np.ones(len(table), np.bool_)
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


def search_order(table: ChunkTable) -> Ints:
    """Return the rows in the order by array and first start, which `StoredPositions` needs."""
    return np.lexsort((table.flat_start, table.start[:, 0], table.array))
