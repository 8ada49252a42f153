"""The load plan: which elements of which stored chunk go where in which requested chunk.

Pure. A chunk is a flat range of a box, so the common part of two chunks is a handful of rectangles, and a
rectangle lies in a chunk's bytes as a strided block: a first element and a stride per dim. That is all a
copy needs on either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints, position_bases, rectangles_of, strides_of
from megackpt.geometry.tiling import Rectangles
from megackpt.metadata import ChunkTable, DeclaredChunks
from megackpt.metadata.chunk_table import widen
from megackpt.planning.bounding import with_bounding_boxes
from megackpt.planning.completeness import Filled, Needed, distinct_chunks, with_one_source
from megackpt.planning.copies import Copies


def plan_load(requested: DeclaredChunks, stored: ChunkTable, *, where: str) -> Copies:
    """Plan one rank's load: fill every element of every requested chunk, each from one stored chunk.

    requested holds one rank's declarations, all of whose keys are among the stored arrays; stored is sorted
    as in an index. Where stored chunks overlap, the last of them is copied from.

    Raises:
        FormatError: the checkpoint lacks elements of an array that may not be resized.
    """
    dims = max(requested.table.dims, stored.dims)
    want, have = padded_to(requested.table, dims), padded_to(stored, dims)
    asked, found = distinct_chunks(have, *overlapping_chunks(want, have), where=where)
    copies = _intersect(want, have, asked, found)
    needed = _needed(requested, want, have)
    filled = _filled(want, have, asked, found, copies)
    copies = with_one_source(copies, filled, needed, want, have, where=where)
    return replace(copies, entity=requested.entity[copies.entity])


def padded_to(table: ChunkTable, dims: int) -> ChunkTable:
    """Return the same chunks with rows of `dims` dims."""
    return ChunkTable(
        table.arrays,
        table.array,
        widen(table.start, dims, fill=0),
        widen(table.shape, dims, fill=1),
        table.flat_start,
        table.flat_stop,
        table.nbytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where n stored rows of a arrays begin along dim 0, array after array; see `position_bases`.

    Attributes:
        number: of each array, by key.
        extent: the furthest first start of a row of each array, `[a]`.
        reach: the largest extent along dim 0 of a row of each array, `[a]`.
        bases: number of the place at which each array begins, `[a]`.
        bound: places of one array are no more than this apart.
        place: of each row, `[n]`, ascending.
    """

    number: Mapping[str, int]
    extent: Ints
    reach: Ints
    bases: Ints
    bound: int
    place: Ints

    @classmethod
    def of(cls, have: ChunkTable) -> Places:
        """Find them for rows that are sorted by array and first start."""
        first = np.searchsorted(have.array, np.arange(len(have.arrays) + 1))
        counts = np.diff(first)
        some = np.flatnonzero(counts)
        reach, extent = np.zeros((2, len(have.arrays)), np.int64)
        if some.size:
            reach[some] = np.maximum.reduceat(have.shape[:, 0], first[some])
            extent[some] = have.start[first[some + 1] - 1, 0]  # the last one begins furthest
        bases, bound = position_bases(extent)
        place = np.repeat(bases, counts) + np.minimum(have.start[:, 0], bound)
        number = {spec.key: i for i, spec in enumerate(have.arrays)}
        return cls(number, extent, reach, bases, bound, place)

    def arrays_of(self, want: ChunkTable) -> Ints:
        """Return the number of the stored array of each wanted row, `[n]`."""
        return np.array([self.number[spec.key] for spec in want.arrays], np.int64)[want.array]

    def reached(self, want: ChunkTable) -> tuple[Ints, Ints]:
        """Return for each wanted row which stored ones may meet it, going by dim 0: a range of rows."""
        array = self.arrays_of(want)
        first = self.bases[array]
        beyond = np.minimum(self.extent, self.bound)[array] + 1  # of all rows of the array, and of no other
        lowest = np.clip(want.start[:, 0] - self.reach[array] + 1, 0, beyond)
        highest = np.minimum(want.start[:, 0] + want.shape[:, 0], beyond)
        low = np.searchsorted(self.place, first + lowest, side="left")
        return low, np.maximum(np.searchsorted(self.place, first + highest, side="left"), low)


def overlapping_chunks(want: ChunkTable, have: ChunkTable, places: Places | None = None) -> tuple[Ints, Ints]:
    """Return pairs (wanted row, stored row) of the same array which may have an element in common, sorted.

    The boxes around their flat ranges meet; of equal ones also the ranges in them. Stored rows are sorted by
    array and first start; places are theirs, for who asks more than once.
    """
    places = places or Places.of(have)
    asked, found = _ranges(*places.reached(want))
    same = have.array[found] == places.arrays_of(want)[asked]  # a damaged index may not be sorted
    if not same.all():
        asked, found = asked[same], found[same]
    for d in range(want.dims):
        a, b = want.start[asked, d], have.start[found, d]
        meets = (a < b + have.shape[found, d]) & (b < a + want.shape[asked, d])
        asked, found = asked[meets], found[meets]
    # Shards of a distributed optimizer are many flat ranges of one box, of which few meet.
    is_equal = np.ones(len(asked), np.bool_)
    for d in range(want.dims):
        is_equal &= want.start[asked, d] == have.start[found, d]
        is_equal &= want.shape[asked, d] == have.shape[found, d]
    meets = want.flat_start[asked] < have.flat_stop[found]
    meets &= have.flat_start[found] < want.flat_stop[asked]
    others = np.flatnonzero(~is_equal)
    meets[others] = _are_near(want, asked[others], have, found[others])
    return asked[meets], found[meets]


def _are_near(want: ChunkTable, asked: Ints, have: ChunkTable, found: Ints) -> npt.NDArray[np.bool_]:
    """Whether pairs of chunks in boxes that meet and differ may have an element in common."""
    inside = np.ones(len(asked), np.bool_)
    for d in range(want.dims):
        first, begin = want.start[asked, d], have.start[found, d]
        inside &= (first <= begin) & (begin + have.shape[found, d] <= first + want.shape[asked, d])
    is_whole = (want.flat_start == 0) & (want.flat_stop == want.shape.prod(axis=1))
    meets: npt.NDArray[np.bool_] = inside & is_whole[asked]
    rest = np.flatnonzero(~meets)
    a, b = with_bounding_boxes(want.take(asked[rest])), with_bounding_boxes(have.take(found[rest]))
    boxes_meet = ((a.start < b.start + b.shape) & (b.start < a.start + a.shape)).all(axis=1)
    are_equal = ((a.start == b.start) & (a.shape == b.shape)).all(axis=1)
    ranges_meet = (a.flat_start < b.flat_stop) & (b.flat_start < a.flat_stop)
    meets[rest] = boxes_meet & (~are_equal | ranges_meet)
    return meets


def _ranges(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Expand ranges: for each i all of `low[i]..high[i]`, as two columns (i, value)."""
    counts = high - low
    row = np.repeat(np.arange(len(low)), counts)
    ends = np.cumsum(counts)
    return row, np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - low, counts)


def _intersect(want: ChunkTable, have: ChunkTable, asked: Ints, found: Ints) -> Copies:
    """Cut both chunks of every pair into rectangles and intersect those; entities are wanted rows."""
    pair_a, start_a, stop_a = _rectangles(want, asked)
    pair_b, start_b, stop_b = _rectangles(have, found)
    first_b = np.searchsorted(pair_b, np.arange(len(asked) + 1))
    left, right = _ranges(first_b[pair_a], first_b[pair_a + 1])
    start = np.maximum(start_a[left], start_b[right])
    shape = np.minimum(stop_a[left], stop_b[right]) - start
    meets = (shape > 0).all(axis=1)
    start, shape, pair = start[meets], shape[meets], pair_a[left[meets]]
    asked, found = asked[pair], found[pair]
    source_stride, target_stride = strides_of(have.shape[found]), strides_of(want.shape[asked])
    target_start = start - want.start[asked]
    return Copies(
        stored=found,
        entity=asked,
        shape=shape,
        source_first=((start - have.start[found]) * source_stride).sum(axis=1) - have.flat_start[found],
        source_stride=source_stride,
        target_start=target_start,
        target_first=(target_start * target_stride).sum(axis=1) - want.flat_start[asked],
        target_stride=target_stride,
    )


def _rectangles(table: ChunkTable, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Rectangles of the chunks in `rows`, in global coordinates: (position in rows, start, stop)."""
    cut = rectangles_of(table.shape[rows], table.flat_start[rows], table.flat_stop[rows])
    start = cut.start + table.start[rows][cut.row]
    return cut.row, start, start + cut.shape


def _filled(want: ChunkTable, have: ChunkTable, asked: Ints, found: Ints, copies: Copies) -> Filled:
    """Return what copies fill, as few rectangles: those of flat ranges that follow one another are joined.

    A sharded optimizer stores many such ranges of one box, of which each alone is several rectangles.
    """
    follows = np.zeros(len(found), np.bool_)
    rows = np.flatnonzero((have.flat_start[found] > 0) & (np.diff(asked, prepend=-1) == 0))
    at, before = found[rows], found[rows - 1]
    follows[rows] = (
        (have.flat_start[at] == have.flat_stop[before])
        & (have.start[at] == have.start[before]).all(axis=1)
        & (have.shape[at] == have.shape[before]).all(axis=1)
    )
    if follows.any():
        first = np.flatnonzero(~follows)
        last = np.append(first[1:], len(found)) - 1
        joined = replace(have.take(found[first]), flat_stop=have.flat_stop[found[last]])
        copies = _intersect(want, joined, asked[first], np.arange(len(first)))
    start = copies.target_start
    return Filled(copies.stored, Rectangles(copies.entity, start, start + copies.shape))


def _needed(requested: DeclaredChunks, want: ChunkTable, have: ChunkTable) -> Needed:
    """Return what is to be filled of each wanted chunk: what the stored array has, if it may be resized."""
    row, start, stop = _rectangles(want, np.arange(len(want)))
    clipped = np.flatnonzero(requested.resizable[row])
    if clipped.size:
        number = {spec.key: i for i, spec in enumerate(have.arrays)}
        stored = np.array([number[spec.key] for spec in want.arrays], np.int64)
        limit = have.padded_global_shape()[stored]
        stop[clipped] = np.minimum(stop[clipped], limit[want.array[row[clipped]]])
        inside = (stop > start).all(axis=1)
        row, start, stop = row[inside], start[inside], stop[inside]
    numel = np.zeros(len(want), np.int64)
    np.add.at(numel, row, (stop - start).prod(axis=1))
    begin = want.start[row]
    return Needed(want.shape, numel, Rectangles(row, start - begin, stop - begin))
