"""The load plan: from which elements of stored chunks to which elements of requested chunks. Pure.

A chunk is a flat range of a box, so the common part of two chunks is a handful of rectangles. A rectangle
lies in the bytes of a chunk at a first element and with one stride per dim. That is all a copy needs on
either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges, position_bases, rectangles_of, strides_of
from megackpt.plans.geometry.tiling import Rectangles
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.planning.completeness import (
    FilledElements,
    NeededElements,
    distinct_chunks,
    with_one_source,
)
from megackpt.plans.planning.copies import FAR_BYTES, Copies

# Which stored chunks may have elements in common with requested ones. Pure, over columns.
#
# A search by dim 0 in the sorted stored chunks, then comparisons of boxes. The candidates may include pairs
# without a common element; `load_plan` intersects them exactly.


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


def plan_load(requested: DeclaredChunks, stored: ChunkTable, *, where: str) -> Copies:
    """Plan one rank's load: fill every element of every requested chunk, each from one stored chunk.

    Where stored chunks overlap, the last of them is copied from. Local.

    Args:
        requested: one rank's declarations, all of whose keys are among the stored arrays.
        stored: the stored chunks, sorted as in an index.
        where: the checkpoint, for errors.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    # Both tables are padded to equal dims, so that columns of the two can be compared.
    dims = max(requested.table.dims, stored.dims)
    requests, chunks = requested.table.padded_to(dims), stored.padded_to(dims)
    request, chunk = overlapping_chunks(requests, chunks)
    request, chunk = distinct_chunks(chunks, request, chunk, where=where)
    copies = _intersect(requests, chunks, request, chunk)
    # Counting elements proves nothing where chunks overlap, so what is needed and what the copies fill are
    # compared as rectangles.
    needed = _needed(requested, requests, chunks)
    filled = _filled(requests, chunks, request, chunk, copies)
    copies = with_one_source(copies, filled, needed, requests, chunks, where=where)
    # Until here `entity` was the row of the request.
    return replace(copies, entity=requested.entity[copies.entity])


def _intersect(requests: ChunkTable, chunks: ChunkTable, request: Ints, chunk: Ints) -> Copies:
    """Return the common rectangles of every pair (request, chunk); `entity` is the row of the request."""
    pair_a, start_a, stop_a = _rectangles(requests, request)
    pair_b, start_b, stop_b = _rectangles(chunks, chunk)
    # Combine every rectangle of the request with every one of the stored chunk of the same pair. Both lists
    # are sorted by pair, so the partners of a rectangle are a range.
    first_b = np.searchsorted(pair_b, np.arange(len(request) + 1))
    partners = first_b[pair_a + 1] - first_b[pair_a]
    left = np.repeat(np.arange(len(pair_a)), partners)
    right = joined_ranges(first_b[pair_a], partners)
    start = np.maximum(start_a[left], start_b[right])
    shape = np.minimum(stop_a[left], stop_b[right]) - start
    overlaps = (shape > 0).all(axis=1)
    start, shape, pair = start[overlaps], shape[overlaps], pair_a[left[overlaps]]
    request, chunk = request[pair], chunk[pair]
    # A rectangle's first element counts from the chunk's first element, which is flat_start of its box.
    source_stride, target_stride = strides_of(chunks.shape[chunk]), strides_of(requests.shape[request])
    target_start = start - requests.start[request]
    return Copies(
        stored=chunk,
        entity=request,
        shape=shape,
        source_first=((start - chunks.start[chunk]) * source_stride).sum(axis=1) - chunks.flat_start[chunk],
        source_stride=source_stride,
        target_start=target_start,
        target_first=(target_start * target_stride).sum(axis=1) - requests.flat_start[request],
        target_stride=target_stride,
    )


def _rectangles(table: ChunkTable, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the rectangles of the chunks in `rows`, in global coordinates: (index in rows, start, stop)."""
    cut = rectangles_of(table.shape[rows], table.flat_start[rows], table.flat_stop[rows])
    start = cut.start + table.start[rows][cut.row]
    return cut.row, start, start + cut.shape


def _filled(
    requests: ChunkTable, chunks: ChunkTable, request: Ints, chunk: Ints, copies: Copies
) -> FilledElements:
    """Return what copies fill, in few rectangles: flat ranges that follow one another are joined.

    A sharded optimizer stores many such ranges of one box, each of which is several rectangles on its own.
    """
    # A chunk continues the one before if both answer the same request, are of one box, and their ranges are
    # adjacent.
    continues = np.zeros(len(chunk), np.bool_)
    rows = np.flatnonzero((chunks.flat_start[chunk] > 0) & (np.diff(request, prepend=-1) == 0))
    here, before = chunk[rows], chunk[rows - 1]
    continues[rows] = (
        (chunks.flat_start[here] == chunks.flat_stop[before])
        & (chunks.start[here] == chunks.start[before]).all(axis=1)
        & (chunks.shape[here] == chunks.shape[before]).all(axis=1)
    )
    if continues.any():
        first = np.flatnonzero(~continues)
        last = np.append(first[1:], len(chunk)) - 1
        joined = replace(chunks.take(chunk[first]), flat_stop=chunks.flat_stop[chunk[last]])
        copies = _intersect(requests, joined, request[first], np.arange(len(first)))
    start = copies.target_start
    return FilledElements(copies.stored, Rectangles(copies.entity, start, start + copies.shape))


def _needed(requested: DeclaredChunks, requests: ChunkTable, chunks: ChunkTable) -> NeededElements:
    """Return what must be filled of each request; of a resizable array only what the stored array has."""
    row, start, stop = _rectangles(requests, np.arange(len(requests)))
    clipped = np.flatnonzero(requested.resizable[row])
    if clipped.size:
        number = {spec.key: i for i, spec in enumerate(chunks.arrays)}
        stored = np.array([number[spec.key] for spec in requests.arrays], np.int64)
        limit = chunks.padded_global_shape()[stored]
        stop[clipped] = np.minimum(stop[clipped], limit[requests.array[row[clipped]]])
        is_inside = (stop > start).all(axis=1)
        row, start, stop = row[is_inside], start[is_inside], stop[is_inside]
    numel = np.zeros(len(requests), np.int64)
    np.add.at(numel, row, (stop - start).prod(axis=1))
    begin = requests.start[row]
    return NeededElements(requests.shape, numel, Rectangles(row, start - begin, stop - begin))


# How many bytes copies make a rank read: whole blocks, and what lies in short gaps.
#
# It computes the sum for many copies at once. A test compares it with `planning.plan_reads`.


def copied_nbytes(copies: Copies, table: ChunkTable) -> int:
    """Return the bytes that copies move; table has the stored chunks."""
    width = table.widths()[copies.stored]
    return int((copies.shape.prod(axis=1) * width).sum())


def read_nbytes(copies: Copies, table: ChunkTable, *, block_bytes: int) -> int:
    """Return the bytes that have to be read for copies, each block once.

    Rows of a copy that lie far apart in the chunk are read one by one, others with what lies between them;
    every read is of whole blocks, or ends with the chunk.
    """
    chunk, start, stop = _byte_ranges(copies, table)
    nbytes = table.nbytes[chunk]
    start = start // block_bytes * block_bytes
    stop = np.minimum(-(-stop // block_bytes) * block_bytes, nbytes)
    order = np.lexsort((start, chunk))
    chunk, start, stop = chunk[order], start[order], stop[order]
    # One line for all chunks, far enough apart not to touch: then a union is a running maximum.
    base = chunk * (int(table.nbytes.max(initial=0)) + 1)
    start, stop = start + base, stop + base
    reached = np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), stop]))[:-1]
    return int(np.maximum(stop - np.maximum(start, reached), 0).sum())


def read_ratio(copies: Copies, table: ChunkTable, *, block_bytes: int, kinds: Ints) -> float:
    """Return how many times the bytes that copies need have to be read for them; 1.0 without copies.

    Args:
        copies: what a load plan copies.
        table: the stored chunks.
        block_bytes: reads begin and end at multiples of this in a chunk, or at its end.
        kinds: a number of each entity, from 0 on. Entities of different kinds may need the same bytes, as a
            parameter and its master do: of each chunk, the kind that needs the most counts.
    """
    width = table.widths()[copies.stored]
    needed = np.zeros((int(kinds.max(initial=0)) + 1, len(table)), np.int64)
    np.add.at(needed, (kinds[copies.entity], copies.stored), copies.shape.prod(axis=1) * width)
    total = int(needed.max(axis=0).sum())
    return read_nbytes(copies, table, block_bytes=block_bytes) / total if total else 1.0


def _byte_ranges(copies: Copies, table: ChunkTable) -> tuple[Ints, Ints, Ints]:
    """Ranges of bytes of chunks that copies touch, without far gaps: (chunk, start, stop)."""
    width = table.widths()[copies.stored]
    chunk, first = copies.stored, copies.source_first
    shape, stride = copies.shape, copies.source_stride
    for d in range(shape.shape[1]):
        inner = ((shape[:, d + 1 :] - 1) * stride[:, d + 1 :]).sum(axis=1) + 1
        is_far = (stride[:, d] - inner) * width >= FAR_BYTES
        # A dim is taken apart only if those before it were, or are of one element.
        is_far &= (shape[:, :d] == 1).all(axis=1) & (shape[:, d] > 1) & (inner > 0)
        is_far &= (shape[:, d + 1 :] > 1).any(axis=1)
        counts = np.where(is_far, shape[:, d], 1)
        row = np.repeat(np.arange(len(chunk)), counts)
        first = first[row] + joined_ranges(0, counts) * stride[row, d]
        chunk, width, stride = chunk[row], width[row], stride[row]
        shape = shape[row].copy()
        shape[is_far[row], d] = 1
    last = first + ((shape - 1) * stride).sum(axis=1) + 1
    return chunk, first * width, last * width
