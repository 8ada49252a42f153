"""The load plan: from which elements of stored chunks to which elements of requested chunks. Pure.

A chunk is a flat range of a box, so the common part of two chunks is a handful of rectangles. A rectangle
lies in the bytes of a chunk at a first element and with one stride per dim. That is all a copy needs on
either side.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.plans.geometry import Ints, joined_ranges, rectangles_of, strides_of
from megackpt.plans.geometry.tiling import Rectangles
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.planning.completeness import (
    FilledElements,
    NeededElements,
    distinct_chunks,
    with_one_source,
)
from megackpt.plans.planning.copies import Copies
from megackpt.plans.planning.overlaps import overlapping_chunks


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
