"""Proof that copies fill every requested element, and one source for each element if chunks overlap. Pure.

Counting elements proves nothing if chunks overlap: an element in two chunks makes up for one in none. So
requests that several chunks answer are proved by corners, as at a save (see `geometry.tiling`). Stored chunks
overlap if they were saved without validation. Their copies are cut, so that each element comes from one
chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, truncated_list
from megackpt.plans.geometry import Ints, joined_ranges, lexicographic_keys
from megackpt.plans.geometry.tiling import Rectangles, joined_cells, uncovered_arrays, uncovered_regions
from megackpt.plans.metadata import ArraySpec, ChunkTable
from megackpt.plans.planning.copies import Copies

MAX_CELLS = 2**22
"""The most cells into which the edges of overlapping chunks may cut them. An ordinary checkpoint has a few
for each chunk, a forged one could have 10**12."""

MOST_TIMES = 64
"""Overlapping chunks may together have so many times the elements of their array, equal chunks counted once.
Planning and reading take as much longer."""

_MAX_NUMEL = 2**62  # of one request: more than an array can have


def distinct_chunks(stored: ChunkTable, request: Ints, chunk: Ints, *, where: str) -> tuple[Ints, Ints]:
    """Leave out pairs of a request and a stored chunk that a later equal chunk repeats.

    Raises:
        FormatError: the remaining chunks have more than MOST_TIMES times the elements of their array.
    """
    is_used = np.zeros(len(stored), np.bool_)
    is_used[chunk] = True
    rows = np.flatnonzero(is_used)
    if not exceed_arrays(stored.take(rows)):
        return request, chunk  # chunks that do not overlap, as almost always
    # After this, equal chunks are neighbours, in index order; the last of them is kept.
    table = stored.take(rows)
    columns = np.column_stack((table.array, table.start, table.shape, table.flat_start, table.flat_stop))
    order = np.lexsort((rows, *columns.T))
    is_last = np.append((np.diff(columns[order], axis=0) != 0).any(axis=1), True)
    rows = rows[order[is_last]]
    exceeded = exceed_arrays(stored.take(rows), times=MOST_TIMES)
    if exceeded:
        raise FormatError(
            f"{where}: stored chunks of {exceeded[0].key!r} overlap: those that this load needs have more "
            f"than {MOST_TIMES} times the {exceeded[0].numel:,} elements of the array. The index is damaged "
            f"or forged; load another checkpoint.",
            key=exceeded[0].key,
            path=where,
        )
    is_used[:] = False
    is_used[rows] = True
    kept = is_used[chunk]
    return request[kept], chunk[kept]


def exceed_arrays(table: ChunkTable, *, times: int = 1) -> list[ArraySpec]:
    """Return the arrays whose chunks together have more than `times` times the elements of the array."""
    numel = (table.flat_stop - table.flat_start).astype(np.float64)  # floats do not overflow
    in_chunks = np.bincount(table.array, numel, minlength=len(table.arrays))
    whole = np.array([spec.numel for spec in table.arrays], np.float64)
    return [table.arrays[i] for i in np.flatnonzero(in_chunks > times * whole).tolist()]


class NeededElements(NamedTuple):
    """The elements that a load has to fill, in n requested chunks.

    Attributes:
        box: extents of the boxes of these chunks, `[n, dims]`.
        numel: number of needed elements of each, `[n]`.
        rectangles: the same elements as disjoint rectangles relative to the box; `array` is the requested
            chunk, ascending.
    """

    box: Ints
    numel: Ints
    rectangles: Rectangles


class FilledElements(NamedTuple):
    """The elements that copies fill.

    Attributes:
        source: what each rectangle is copied from: the number of a stored chunk, or of several adjacent ones,
            `[m]`; ascending for each requested chunk.
        rectangles: relative to the box; `array` is the requested chunk, ascending.
    """

    source: Ints
    rectangles: Rectangles

    def numel(self, count: int) -> Ints:
        """Return how many elements are copied into each of `count` requested chunks, `[count]`."""
        numel = (self.rectangles.stop - self.rectangles.start).prod(axis=1)
        filled = np.zeros(count, np.int64)
        np.add.at(filled, self.rectangles.array, numel)
        # The sum of integers may wrap around where very many chunks overlap; that of floats tells.
        total = np.bincount(self.rectangles.array, numel.astype(np.float64), minlength=count)
        return np.where(total > _MAX_NUMEL, _MAX_NUMEL, filled)


def with_one_source(
    copies: Copies,
    filled: FilledElements,
    needed: NeededElements,
    requests: ChunkTable,
    stored: ChunkTable,
    *,
    where: str,
) -> Copies:
    """Prove that copies fill everything that is needed; return them, each element from one stored chunk.

    Of overlapping chunks the last in index order is copied from.

    Args:
        copies: those of all stored chunks, sorted by `entity`, which here is the row of requests.
        filled: what the copies fill.
        needed: what they must fill.
        requests: the requested chunks.
        stored: the stored chunks.
        where: the checkpoint, for errors.

    Raises:
        FormatError: some element is in no chunk, or chunks overlap in more than MAX_CELLS cells.
    """
    overlapping = _overlapping(filled, needed, requests, where)
    if not overlapping.any():
        return copies
    # Requests that are filled more than once have their copies cut; those of the others stay.
    rows = np.flatnonzero(overlapping[copies.entity])
    rest = np.flatnonzero(~overlapping[copies.entity])
    cut, parent = _last_of_each(copies.take(rows), stored, where)
    order = np.argsort(np.concatenate((rest, rows[parent])), kind="stable")
    joined = Copies(
        *(np.concatenate((getattr(copies, n)[rest], getattr(cut, n)))[order] for n in Copies.__slots__)
    )
    # Now no element is filled twice, so the number of elements is a proof.
    start = joined.target_start
    filled = FilledElements(joined.stored, Rectangles(joined.entity, start, start + joined.shape))
    _check_filled(filled.numel(len(requests)) < needed.numel, filled, needed, requests, where)
    return joined


def _overlapping(
    filled: FilledElements, needed: NeededElements, requests: ChunkTable, where: str
) -> npt.NDArray[np.bool_]:
    """Return which requested chunks are not filled exactly once, `[n]`; some of them may lack elements.

    Raises:
        FormatError: too few elements are copied into a chunk, so it is certainly not filled.
    """
    count = len(requests)
    numel = filled.numel(count)
    _check_filled(numel < needed.numel, filled, needed, requests, where)
    # The rectangles of one source do not overlap, so for a request with one source the number of elements is
    # a proof. Sources ascend, so it is enough to compare the first and the last.
    first = np.searchsorted(filled.rectangles.array, np.arange(count + 1))
    has_source = np.flatnonzero(np.diff(first) > 0)
    has_several = np.zeros(count, np.bool_)
    has_several[has_source] = filled.source[first[has_source]] != filled.source[first[has_source + 1] - 1]
    # More elements than needed overlap for certain. The rest is proved by the corners of rectangles.
    overlapping = numel > needed.numel
    rows = np.flatnonzero(has_several & ~overlapping)
    rectangles, box, expected = _of_requests(filled, needed, rows)
    overlapping[rows[uncovered_arrays(rectangles, box, expected)]] = True
    return overlapping


def _of_requests(
    filled: FilledElements, needed: NeededElements, rows: Ints
) -> tuple[Rectangles, Ints, Rectangles]:
    """Return what is filled, the boxes, and what is needed of some requested chunks, numbered from 0."""
    number = np.full(len(needed.numel), -1)
    number[rows] = np.arange(len(rows))

    def chosen(rectangles: Rectangles) -> Rectangles:
        of = number[rectangles.array]
        inside = np.flatnonzero(of >= 0)
        return rectangles.take(inside)._replace(array=of[inside])

    return chosen(filled.rectangles), needed.box[rows], chosen(needed.rectangles)


def _last_of_each(copies: Copies, stored: ChunkTable, where: str) -> tuple[Copies, Ints]:
    """Cut copies so that no two fill the same element; return them, and the copy that each was cut from.

    Raises:
        FormatError: there would be more than MAX_CELLS of them.
    """
    dims = copies.shape.shape[1]
    # Along each dim, edges are numbered by request and position. A cell lies between neighbouring edges of
    # every dim, so each copy is a box of whole cells.
    edges = [_edges(copies.entity, copies.target_start[:, d], copies.shape[:, d]) for d in range(dims)]
    low = np.column_stack([edge.low for edge in edges])
    cells = np.column_stack([edge.high for edge in edges]) - low
    if cells.prod(axis=1, dtype=float).sum() > MAX_CELLS:
        key = stored.arrays[int(stored.array[copies.stored[0]])].key
        raise FormatError(
            f"{where}: stored chunks of {key!r} overlap in more than {MAX_CELLS:,} places. The index is "
            f"damaged or forged; if neither, load smaller parts of the array at a time, or save it with "
            f"validate_access_integrity=True.",
            key=key,
            path=where,
        )
    of, cell = _listed_cells(low, cells)
    # After this, equal cells are neighbours, in the order of stored chunks; the copy of the last chunk keeps
    # it.
    radix = np.array([[len(edge.value) for edge in edges]])
    number = lexicographic_keys(np.zeros_like(of), cell, radix)
    order = np.lexsort((copies.stored[of], number))
    is_last = np.append(np.diff(number[order]) != 0, True)
    kept = order[is_last]
    # Neighbouring cells of one copy become one box again.
    begin, end, of = joined_cells(cell[kept], of[kept])
    value = [edge.value for edge in edges]
    start = np.column_stack([value[d][begin[:, d]] for d in range(dims)])
    stop = np.column_stack([value[d][end[:, d]] for d in range(dims)])
    cut = copies.take(of)
    shift = start - cut.target_start
    cut = replace(
        cut,
        shape=stop - start,
        source_first=cut.source_first + (shift * cut.source_stride).sum(axis=1),
        target_start=start,
        target_first=cut.target_first + (shift * cut.target_stride).sum(axis=1),
    )
    return cut, of


def _listed_cells(low: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """List the cells of boxes that begin at edges `low` and have `counts` cells along each dim, `[n, dims]`.

    Returns:
        The box of each cell, `[c]`; and the numbers of the edges where the cell begins, `[c, dims]`.
    """
    dims, cells_of_box = low.shape[1], counts.prod(axis=1)
    of = np.repeat(np.arange(len(low)), cells_of_box)
    cell, rest = np.empty((len(of), dims), np.int64), joined_ranges(0, cells_of_box)
    for d in range(dims - 1, -1, -1):
        cell[:, d] = low[of, d] + rest % counts[of, d]
        rest = rest // counts[of, d]
    return of, cell


class _Edges(NamedTuple):
    """Where rectangles begin and end along one dim.

    Attributes:
        low: number of the edge at which each rectangle begins.
        high: number of the edge at which it ends.
        value: position of each edge, by number.
    """

    low: Ints
    high: Ints
    value: Ints


def _edges(entity: Ints, start: Ints, extent: Ints) -> _Edges:
    """Number the different edges of each entity in the order of entities and positions."""
    # Row i is the edge at which rectangle i begins, row len(entity) + i that at which it ends.
    both, value = np.concatenate((entity, entity)), np.concatenate((start, start + extent))
    order = np.lexsort((value, both))
    # Equal edges are neighbours now, and the first of each is marked. Marks so far, less 1, are the number.
    begins = np.append(True, (np.diff(both[order]) != 0) | (np.diff(value[order]) != 0))
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(begins) - 1
    return _Edges(number[: len(entity)], number[len(entity) :], value[order][begins])


def _check_filled(
    is_short: npt.NDArray[np.bool_],
    filled: FilledElements,
    needed: NeededElements,
    requests: ChunkTable,
    where: str,
) -> None:
    """Raise an error that names the requested chunks that are not filled, and a missing box of the first."""
    rows = np.flatnonzero(is_short)
    if not rows.size:
        return
    keys = [requests.arrays[a].key for a in requests.array[rows].tolist()]
    lines = [f"{key!r}: {requests.describe(row)}" for key, row in zip(keys, rows.tolist(), strict=True)]
    lines[0] += f", of which no stored chunk has [{_first_missing(filled, needed, requests, int(rows[0]))}]"
    raise FormatError(
        f"{where} has no data for some elements of these chunks:\n{truncated_list(lines)}\n"
        f"The checkpoint is incomplete; load another one.",
        key=keys[0],
        path=where,
    )


def _first_missing(filled: FilledElements, needed: NeededElements, requests: ChunkTable, row: int) -> str:
    """Return the first box of a requested chunk that nothing fills, as text."""
    (regions,) = uncovered_regions(*_of_requests(filled, needed, np.array([row])))
    # A count of 0: in no chunk. Below 0: too many regions to examine, in a box around them.
    at = int(np.flatnonzero(regions.count <= 0)[0])
    dims = len(requests.arrays[int(requests.array[row])].global_shape)
    low, high = regions.start[at] + requests.start[row], regions.stop[at] + requests.start[row]
    return ", ".join(f"{a}:{b}" for a, b in zip(low[:dims].tolist(), high[:dims].tolist(), strict=True))
