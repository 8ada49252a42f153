"""Proof that rectangles tile arrays, and where they do not. Pure, over columns.

Owns the geometry of exactly-once coverage for all arrays at once, however they are cut.

How many rectangles cover an element is a function of its place. Taking differences of it along every axis
leaves +1 or -1 at each corner of each rectangle and 0 elsewhere; summing those up again gives the function
back. So rectangles cover an array exactly once if and only if their signed corners are, after cancelling, the
corners of the whole array. On one axis that reads: the starts, but for the first, are the stops, but for the
last. A corner is a single integer here, so the proof for a million rectangles of any sizes is two sorts and
one comparison; and where it fails, the corners left over are all it takes to find the faulty regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.geometry.flat import Ints

Mask = npt.NDArray[np.bool_]

MAX_CELLS = 2**22
"""Above this many cells between left-over corners, an array's faults are named by one box around them."""

ADDRESSES = 2**62
"""Corners are numbered below this; arrays that need more are proved in several parts."""


class Rectangles(NamedTuple):
    """Non-empty rectangles of several arrays.

    Attributes:
        array: number of the array, `[n]`.
        start: first element, `[n, dims]`.
        stop: one past the last, `[n, dims]`.
    """

    array: Ints
    start: Ints
    stop: Ints

    def take(self, rows: Ints) -> Rectangles:
        """Return the chosen rows."""
        return Rectangles(self.array[rows], self.start[rows], self.stop[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes of one array that are not covered exactly once, in row-major order of their first elements.

    Attributes:
        array: number of the array.
        start: first element, `[n, dims]`.
        stop: one past the last, `[n, dims]`.
        count: how many rectangles cover each element of it, `[n]`: 0, or 2 and more; -1 where it was not
            examined which (see MAX_CELLS).
    """

    array: int
    start: Ints
    stop: Ints
    count: Ints


def uncovered_regions(pieces: Rectangles, whole: Ints, expected: Rectangles | None = None) -> list[Regions]:
    """Return where arrays are not covered exactly once, sorted by array; empty if there is no such place.

    whole is the shape of each array, `[arrays, dims]`; an array without elements is covered by nothing.
    expected holds what is to be covered, which no rectangle of pieces leaves: disjoint rectangles; None for
    all elements of all arrays.

    >>> halves = Rectangles(np.array([0, 0]), np.array([[0], [4]]), np.array([[3], [8]]))
    >>> (found,) = uncovered_regions(halves, np.array([[8]]))
    >>> found.start.tolist(), found.stop.tolist(), found.count.tolist()
    ([[3]], [[4]], [0])
    """
    found: list[Regions] = []
    for array, place, weight, split in _left_over_parts(pieces, whole, expected):
        bounds = np.append(np.flatnonzero(np.diff(array, prepend=-1)), len(array)).tolist()
        found += [
            _regions_of(int(array[a]), place[a:b], weight[a:b], whole, split) for a, b in pairwise(bounds)
        ]
    return found


def uncovered_arrays(pieces: Rectangles, whole: Ints, expected: Rectangles) -> Ints:
    """Return the numbers of arrays of which what is expected is not covered exactly once, ascending.

    As `uncovered_regions`, without finding where.
    """
    arrays = [np.unique(part[0]) for part in _left_over_parts(pieces, whole, expected)]
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _left_over_parts(
    pieces: Rectangles, whole: Ints, expected: Rectangles | None
) -> Iterator[tuple[Ints, Ints, Ints, Mask]]:
    """Yield the corners that do not cancel, in order, as (array, place, weight, split dims of all arrays)."""
    if expected is None:
        present = np.flatnonzero((whole > 0).all(axis=1))
        expected = Rectangles(present, np.zeros_like(whole[present]), whole[present])
    split = _split_dims(pieces, whole) | _split_dims(expected, whole)
    parts = _parts(np.where(split, whole + 1, 1))
    for part in parts:
        of = (pieces, expected)
        if len(parts) > 1:
            of = (_of_arrays(pieces, part), _of_arrays(expected, part))
        array, place, weight = _left_over_of_part(*of, whole, split, part)
        if len(array):
            yield array, place, weight, split


def _of_arrays(rectangles: Rectangles, arrays: Ints) -> Rectangles:
    return rectangles.take(np.flatnonzero(np.isin(rectangles.array, arrays)))


def _split_dims(pieces: Rectangles, whole: Ints) -> Mask:
    """Along which dims an array is cut, `[arrays, dims]`: only those need corners. Dim 0 always counts."""
    split: Mask = np.zeros(whole.shape, np.bool_)
    for d in range(whole.shape[1]):
        cut = (pieces.start[:, d] != 0) | (pieces.stop[:, d] != whole[pieces.array, d])
        split[pieces.array[cut], d] = True
    split[:, 0] = True
    return split


def _parts(radix: Ints) -> list[Ints]:
    """Group arrays, in order, so that the corners of each group can be numbered below ADDRESSES."""
    if radix.prod(axis=1, dtype=float).sum() < ADDRESSES / 2:  # far enough below for what floats round off
        return [np.arange(len(radix))]
    sizes = [math.prod(row) for row in radix.tolist()]  # Python's integers: no overflow goes unseen
    parts: list[list[int]] = [[]]
    room = ADDRESSES
    for array, size in enumerate(sizes):
        if size > room and parts[-1]:
            parts.append([])
            room = ADDRESSES
        parts[-1].append(array)
        room -= size
    return [np.array(part, np.int64) for part in parts]


def _left_over_of_part(
    pieces: Rectangles, expected: Rectangles, whole: Ints, split: Mask, part: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the corners of some arrays that do not cancel: array, place and weight."""
    radix = np.where(split[part], whole[part] + 1, 1)
    stride, base = np.zeros_like(whole), np.zeros(len(whole), np.int64)
    sizes, stride[part] = _strides(radix)
    base[part] = np.cumsum(sizes) - sizes
    plus, minus = _corners(pieces, split, stride, base)
    expected_plus, expected_minus = _corners(expected, split, stride, base)
    plus, minus = np.concatenate((plus, expected_minus)), np.concatenate((minus, expected_plus))
    plus.sort()
    minus.sort()
    differs = plus != minus
    if not differs.any():
        none = np.zeros(0, np.int64)
        return none, np.zeros((0, whole.shape[1]), np.int64), none
    corner, weight = _left_over(plus[differs], minus[differs])
    array = part[np.searchsorted(base[part], corner, side="right") - 1]
    place = (corner - base[array])[:, None] // stride[array] % np.where(split[array], whole[array] + 1, 1)
    return array, place, weight


def _strides(radix: Ints) -> tuple[Ints, Ints]:
    """Return the product of each row and its row-major strides."""
    behind = np.cumprod(radix[:, ::-1], axis=1)[:, ::-1]
    return behind[:, 0], np.concatenate((behind[:, 1:], np.ones_like(behind[:, :1])), axis=1)


def _corners(pieces: Rectangles, split: Mask, stride: Ints, base: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of the corners that count +1 and of those that count -1.

    Each array has as many of the one as of the other, so once sorted both lists keep in step, array by array.
    """
    first = base[pieces.array]
    for d in range(stride.shape[1]):
        first += pieces.start[:, d] * stride[pieces.array, d]
    plus, minus = first, np.zeros(0, np.int64)
    plus_row, minus_row = np.arange(len(first)), np.zeros(0, np.int64)
    for d in range(stride.shape[1]):
        cut = split[pieces.array, d]
        if not cut.any():
            continue
        step = (pieces.stop[:, d] - pieces.start[:, d]) * stride[pieces.array, d]
        p, m = np.flatnonzero(cut[plus_row]), np.flatnonzero(cut[minus_row])
        p_row, m_row = plus_row[p], minus_row[m]
        plus, minus = (
            np.concatenate((plus, minus[m] + step[m_row])),
            np.concatenate((minus, plus[p] + step[p_row])),
        )
        plus_row, minus_row = np.concatenate((plus_row, m_row)), np.concatenate((minus_row, p_row))
    return plus, minus


def _left_over(plus: Ints, minus: Ints) -> tuple[Ints, Ints]:
    """Cancel equal corners; return those left, ascending, and their weights."""
    corner, inverse = np.unique(np.concatenate((plus, minus)), return_inverse=True)
    size = len(corner)
    weight = np.bincount(inverse[: len(plus)], minlength=size) - np.bincount(
        inverse[len(plus) :], minlength=size
    )
    left = np.flatnonzero(weight)
    return corner[left], weight[left]


def _regions_of(
    array: int,
    place: Ints,
    weight: Ints,
    whole: Ints,
    split: Mask,
) -> Regions:
    """Sum the left-over corners of one array up again, on the coarsest grid that has them all."""
    dims = [int(d) for d in np.flatnonzero(split[array])]
    edges = [np.unique(place[:, d]) for d in dims]
    if math.prod(len(e) for e in edges) > MAX_CELLS:
        cells = np.zeros((1, len(dims)), np.int64)
        spans = np.array([[0, len(e) - 1] for e in edges], np.int64).T
        lows, highs, count = spans[:1], spans[1:], np.array([-1])
    else:
        excess = np.zeros([len(e) for e in edges], np.int64)
        corners = tuple(np.searchsorted(e, place[:, d]) for e, d in zip(edges, dims, strict=True))
        np.add.at(excess, corners, weight)
        for axis in range(len(dims)):
            np.cumsum(excess, axis=axis, out=excess)
        cells = np.argwhere(excess)
        lows, highs, count = joined_cells(cells, excess[tuple(cells.T)] + 1)
    start, stop = (
        np.zeros((len(lows), whole.shape[1]), np.int64),
        np.repeat(whole[array][None], len(lows), axis=0),
    )
    for i, d in enumerate(dims):
        start[:, d], stop[:, d] = edges[i][lows[:, i]], edges[i][highs[:, i]]
    order = np.lexsort(start.T[::-1])
    return Regions(array, start[order], stop[order], count[order])


def joined_cells(cells: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Join neighbouring cells of equal count into boxes, along the last axis first: low, high and count."""
    low, high = cells, cells + 1
    for axis in range(cells.shape[1] - 1, -1, -1):
        others = [d for d in range(cells.shape[1]) if d != axis]
        fixed = np.column_stack((low[:, others], high[:, others], count))
        order = np.lexsort((low[:, axis], *fixed.T))
        low, high, count, fixed = low[order], high[order], count[order], fixed[order]
        begins = np.ones(len(low), np.bool_)
        begins[1:] = (fixed[1:] != fixed[:-1]).any(axis=1) | (low[1:, axis] != high[:-1, axis])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(low)) - 1
        stop = high[last, axis]
        low, high, count = low[first], high[first].copy(), count[first]
        high[:, axis] = stop
    return low, high, count
