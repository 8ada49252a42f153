"""Proof that copies fill every element that is asked for, and one source for each where chunks overlap.

Pure. To count elements is no proof: an element that two chunks hold pays for one that none holds. The proof
is that of a save, by corners (see `geometry.tiling`), for requests that several chunks answer. Where it fails
because stored chunks overlap, which a save without validation may write, their copies are cut so that each
element comes from one chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, truncated_list
from megackpt.geometry import Ints, joined_ranges, lexicographic_keys
from megackpt.geometry.tiling import Rectangles, joined_cells, uncovered_arrays, uncovered_regions
from megackpt.metadata import ArraySpec, ChunkTable
from megackpt.planning.copies import Copies

MAX_CELLS = 2**22
"""Where chunks overlap, the lines of their edges cut them into cells. More cells than this are refused: an
honest checkpoint has a few for each chunk, a forged one could have 10**12."""

MOST_TIMES = 64
"""Overlapping chunks of an array that together have more than so many times its elements are refused, equal
chunks counted once: to plan and to read them could take as much longer."""

_VAST = 2**62  # elements of one request: more than an array can have


def distinct_chunks(stored: ChunkTable, asked: Ints, found: Ints, *, where: str) -> tuple[Ints, Ints]:
    """Leave out pairs of a request and a stored chunk that a later chunk repeats, where there are such.

    Raises:
        FormatError: the others have many times the elements of their array.
    """
    is_found = np.zeros(len(stored), np.bool_)
    is_found[found] = True
    rows = np.flatnonzero(is_found)
    if not exceed_arrays(stored.take(rows)):
        return asked, found
    table = stored.take(rows)
    columns = np.column_stack((table.array, table.start, table.shape, table.flat_start, table.flat_stop))
    order = np.lexsort((rows, *columns.T))
    last = np.append((np.diff(columns[order], axis=0) != 0).any(axis=1), True)
    rows = rows[order[last]]
    beyond = exceed_arrays(stored.take(rows), times=MOST_TIMES)
    if beyond:
        raise FormatError(
            f"{where}: stored chunks of {beyond[0].key!r} overlap: those that this load needs have more "
            f"than {MOST_TIMES} times the {beyond[0].numel:,} elements of the array. The index is damaged or "
            f"forged; load another checkpoint.",
            key=beyond[0].key,
            path=where,
        )
    is_found[:] = False
    is_found[rows] = True
    kept = is_found[found]
    return asked[kept], found[kept]


def exceed_arrays(table: ChunkTable, *, times: int = 1) -> list[ArraySpec]:
    """Return the arrays that have fewer elements than their chunks have, or than a part of that."""
    numel = (table.flat_stop - table.flat_start).astype(np.float64)  # floats do not overflow
    held = np.bincount(table.array, numel, minlength=len(table.arrays))
    whole = np.array([spec.numel for spec in table.arrays], np.float64)
    return [table.arrays[i] for i in np.flatnonzero(held > times * whole).tolist()]


class NeededElements(NamedTuple):
    """What a load has to fill, in n requested chunks.

    Attributes:
        box: extents of the boxes of these chunks, `[n, dims]`.
        numel: how many elements of each are needed, `[n]`.
        parts: the same as disjoint rectangles, relative to the box; `array` is the chunk, ascending.
    """

    box: Ints
    numel: Ints
    parts: Rectangles


class FilledElements(NamedTuple):
    """What copies fill.

    Attributes:
        source: a number of what each part is copied from, a stored chunk or several that do not overlap,
            `[m]`; ascending for each requested chunk.
        parts: rectangles relative to the box; `array` is the requested chunk, ascending.
    """

    source: Ints
    parts: Rectangles

    def numel(self, count: int) -> Ints:
        """Return how many elements are put into each of `count` requested chunks, `[count]`."""
        numel = (self.parts.stop - self.parts.start).prod(axis=1)
        filled = np.zeros(count, np.int64)
        np.add.at(filled, self.parts.array, numel)
        total = np.bincount(self.parts.array, numel.astype(np.float64), minlength=count)
        return np.where(total > _VAST, _VAST, filled)  # integers would wrap around there


def with_one_source(
    copies: Copies,
    filled: FilledElements,
    needed: NeededElements,
    wanted: ChunkTable,
    stored: ChunkTable,
    *,
    where: str,
) -> Copies:
    """Prove that copies fill all that is needed; return them, each element from one stored chunk.

    copies are those of all stored chunks, sorted by `entity`, which here is the row of wanted, and filled is
    what they fill. Of overlapping chunks the last in index order is copied from.

    Raises:
        FormatError: some element is in no chunk; or chunks overlap in more ways than are untangled.
    """
    overlapping = _overlapping(filled, needed, wanted, where)
    if not overlapping.any():
        return copies
    rows = np.flatnonzero(overlapping[copies.entity])
    rest = np.flatnonzero(~overlapping[copies.entity])
    cut, parent = _last_of_each(copies.take(rows), stored, where)
    order = np.argsort(np.concatenate((rest, rows[parent])), kind="stable")
    both = Copies(
        *(np.concatenate((getattr(copies, n)[rest], getattr(cut, n)))[order] for n in Copies.__slots__)
    )
    start = both.target_start
    filled = FilledElements(both.stored, Rectangles(both.entity, start, start + both.shape))
    _refuse_short(filled.numel(len(wanted)) < needed.numel, filled, needed, wanted, where)
    return both


def _overlapping(
    filled: FilledElements, needed: NeededElements, wanted: ChunkTable, where: str
) -> npt.NDArray[np.bool_]:
    """Return which requested chunks are not filled exactly once; some of them may lack elements, `[n]`.

    Raises:
        FormatError: one is certainly not filled, as too few elements are copied into it.
    """
    count = len(wanted)
    numel = filled.numel(count)
    _refuse_short(numel < needed.numel, filled, needed, wanted, where)
    # What comes from one source does not overlap, so the number of elements is a proof.
    first = np.searchsorted(filled.parts.array, np.arange(count + 1))
    some = np.flatnonzero(np.diff(first) > 0)
    has_several = np.zeros(count, np.bool_)
    has_several[some] = filled.source[first[some]] != filled.source[first[some + 1] - 1]
    overlapping = numel > needed.numel
    rows = np.flatnonzero(has_several & ~overlapping)
    pieces, box, expected = _chosen(filled, needed, rows)
    overlapping[rows[uncovered_arrays(pieces, box, expected)]] = True
    return overlapping


def _chosen(
    filled: FilledElements, needed: NeededElements, rows: Ints
) -> tuple[Rectangles, Ints, Rectangles]:
    """Return what is filled, the boxes, and what is needed of some requested chunks, numbered from 0."""
    number = np.full(len(needed.numel), -1)
    number[rows] = np.arange(len(rows))

    def chosen(parts: Rectangles) -> Rectangles:
        of = number[parts.array]
        mine = np.flatnonzero(of >= 0)
        return parts.take(mine)._replace(array=of[mine])

    return chosen(filled.parts), needed.box[rows], chosen(needed.parts)


def _last_of_each(copies: Copies, stored: ChunkTable, where: str) -> tuple[Copies, Ints]:
    """Cut copies so that no two put the same element; return them, and which copy each was cut out of.

    Raises:
        FormatError: that would be too many.
    """
    dims = copies.shape.shape[1]
    # Along each dim, edges are numbered in the order of requests and places: a cell lies between neighbours.
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
    counts = cells.prod(axis=1)
    of = np.repeat(np.arange(len(copies)), counts)
    cell, rest = np.empty((len(of), dims), np.int64), joined_ranges(0, counts)
    for d in range(dims - 1, -1, -1):
        cell[:, d] = low[of, d] + rest % cells[of, d]
        rest = rest // cells[of, d]
    # Of the copies that have a cell, the one of the last stored chunk keeps it.
    radix = np.array([[len(edge.value) for edge in edges]])
    number = lexicographic_keys(np.zeros_like(of), cell, radix)
    order = np.lexsort((copies.stored[of], number))
    last = np.append(np.diff(number[order]) != 0, True)
    won = order[last]
    begin, end, of = joined_cells(cell[won], of[won])
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


class _Edges(NamedTuple):
    """Where rectangles begin and end along one dim: numbers of these edges, and their places by number."""

    low: Ints
    high: Ints
    value: Ints


def _edges(entity: Ints, start: Ints, extent: Ints) -> _Edges:
    both, value = np.concatenate((entity, entity)), np.concatenate((start, start + extent))
    order = np.lexsort((value, both))
    begins = np.append(True, (np.diff(both[order]) != 0) | (np.diff(value[order]) != 0))
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(begins) - 1
    return _Edges(number[: len(entity)], number[len(entity) :], value[order][begins])


def _refuse_short(
    is_short: npt.NDArray[np.bool_],
    filled: FilledElements,
    needed: NeededElements,
    wanted: ChunkTable,
    where: str,
) -> None:
    rows = np.flatnonzero(is_short)
    if not rows.size:
        return
    keys = [wanted.arrays[a].key for a in wanted.array[rows].tolist()]
    lines = [f"{key!r}: {wanted.describe(row)}" for key, row in zip(keys, rows.tolist(), strict=True)]
    lines[0] += f", of which no stored chunk has [{_first_missing(filled, needed, wanted, int(rows[0]))}]"
    raise FormatError(
        f"{where} has no data for some elements of these chunks:\n{truncated_list(lines)}\n"
        f"The checkpoint is incomplete; load another one.",
        key=keys[0],
        path=where,
    )


def _first_missing(filled: FilledElements, needed: NeededElements, wanted: ChunkTable, row: int) -> str:
    """Return the first box of a requested chunk that nothing fills, as text."""
    (regions,) = uncovered_regions(*_chosen(filled, needed, np.array([row])))
    # A count of 0: in no chunk. Below 0: too many regions to examine, in a box around them.
    at = int(np.flatnonzero(regions.count <= 0)[0])
    dims = len(wanted.arrays[int(wanted.array[row])].global_shape)
    low, high = regions.start[at] + wanted.start[row], regions.stop[at] + wanted.start[row]
    return ", ".join(f"{a}:{b}" for a, b in zip(low[:dims].tolist(), high[:dims].tolist(), strict=True))
