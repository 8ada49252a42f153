"""Proof that rectangles tile arrays exactly once, and where they do not. Pure, over columns.

The number of rectangles that cover an element is a function of its position. The differences of this function
along every axis are +1 or -1 at each corner of each rectangle and 0 elsewhere, and their sums give the
function back. So rectangles cover an array exactly once if and only if their signed corners cancel to the
corners of the whole array. With one axis: the starts, without the first, are equal to the stops, without the
last.

A corner is one integer here, so the proof for a million rectangles of any sizes is two sorts and one
comparison. If it fails, the corners that are left suffice to find the faulty regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry.flat import Ints, strides_of

Mask = npt.NDArray[np.bool_]

MAX_CELLS = 2**22
"""If the corners that are left make more cells, one box around all faults of the array is named."""

ADDRESSES = 2**62
"""Corners are numbered below this; if all arrays together need more, they are proved in several groups."""


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
        count: how many rectangles cover each element, `[n]`: 0, or 2 and more; -1 if that was not examined
            (see MAX_CELLS).
    """

    array: int
    start: Ints
    stop: Ints
    count: Ints


def uncovered_regions(
    rectangles: Rectangles, whole: Ints, expected: Rectangles | None = None
) -> list[Regions]:
    """Return where arrays are not covered exactly once, sorted by array; empty if they all are.

    Args:
        rectangles: what covers the arrays.
        whole: the shape of each array, `[arrays, dims]`; an array without elements needs no rectangle.
        expected: what has to be covered, as disjoint rectangles that contain all others; None for all
            elements.

    >>> halves = Rectangles(np.array([0, 0]), np.array([[0], [4]]), np.array([[3], [8]]))
    >>> (found,) = uncovered_regions(halves, np.array([[8]]))
    >>> found.start.tolist(), found.stop.tolist(), found.count.tolist()
    ([[3]], [[4]], [0])
    """
    uncovered: list[Regions] = []
    for array, position, weight, split in _left_over_corners(rectangles, whole, expected):
        bounds = np.append(np.flatnonzero(np.diff(array, prepend=-1)), len(array)).tolist()
        uncovered += [
            _regions_of(int(array[a]), position[a:b], weight[a:b], whole, split) for a, b in pairwise(bounds)
        ]
    return uncovered


def uncovered_arrays(rectangles: Rectangles, whole: Ints, expected: Rectangles) -> Ints:
    """Return the numbers of the arrays with regions that `uncovered_regions` would find, ascending."""
    arrays = [np.unique(left[0]) for left in _left_over_corners(rectangles, whole, expected)]
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _left_over_corners(
    rectangles: Rectangles, whole: Ints, expected: Rectangles | None
) -> Iterator[tuple[Ints, Ints, Ints, Mask]]:
    """Yield the corners that do not cancel, as (array, position, weight, split dims of all arrays)."""
    if expected is None:
        present = np.flatnonzero((whole > 0).all(axis=1))
        expected = Rectangles(present, np.zeros_like(whole[present]), whole[present])
    split = _split_dims(rectangles, whole) | _split_dims(expected, whole)
    groups = _groups(np.where(split, whole + 1, 1))
    for group in groups:
        both = (rectangles, expected)
        if len(groups) > 1:
            both = (_of_arrays(rectangles, group), _of_arrays(expected, group))
        array, position, weight = _left_over_of_group(*both, whole, split, group)
        if len(array):
            yield array, position, weight, split


def _of_arrays(rectangles: Rectangles, arrays: Ints) -> Rectangles:
    return rectangles.take(np.flatnonzero(np.isin(rectangles.array, arrays)))


def _split_dims(rectangles: Rectangles, whole: Ints) -> Mask:
    """Return the dims along which arrays are cut, and dim 0, `[arrays, dims]`: only these need corners."""
    split: Mask = np.zeros(whole.shape, np.bool_)
    for d in range(whole.shape[1]):
        cut = (rectangles.start[:, d] != 0) | (rectangles.stop[:, d] != whole[rectangles.array, d])
        split[rectangles.array[cut], d] = True
    split[:, 0] = True
    return split


def _groups(radix: Ints) -> list[Ints]:
    """Group arrays, in order, so that the corners of each group can be numbered below ADDRESSES."""
    if radix.prod(axis=1, dtype=float).sum() < ADDRESSES / 2:  # far enough below for what floats round off
        return [np.arange(len(radix))]
    sizes = [math.prod(row) for row in radix.tolist()]  # Python's integers: no overflow goes unseen
    groups: list[list[int]] = [[]]
    room = ADDRESSES
    for array, size in enumerate(sizes):
        if size > room and groups[-1]:
            groups.append([])
            room = ADDRESSES
        groups[-1].append(array)
        room -= size
    return [np.array(group, np.int64) for group in groups]


def _left_over_of_group(
    rectangles: Rectangles, expected: Rectangles, whole: Ints, split: Mask, group: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the corners of a group of arrays that do not cancel: array, position and weight."""
    # A corner of array a at position p is base[a] + p * stride[a]: different corners have different numbers.
    radix = np.where(split[group], whole[group] + 1, 1)
    stride, base = np.zeros_like(whole), np.zeros(len(whole), np.int64)
    stride[group], sizes = strides_of(radix), radix.prod(axis=1)
    base[group] = np.cumsum(sizes) - sizes
    plus, minus = _corners(rectangles, split, stride, base)
    expected_plus, expected_minus = _corners(expected, split, stride, base)
    # The corners of what is expected count with the opposite sign. If all corners cancel, both sorted lists
    # are equal.
    plus, minus = np.concatenate((plus, expected_minus)), np.concatenate((minus, expected_plus))
    plus.sort()
    minus.sort()
    differs = plus != minus
    if not differs.any():
        none = np.zeros(0, np.int64)
        return none, np.zeros((0, whole.shape[1]), np.int64), none
    corner, weight = _left_over(plus[differs], minus[differs])
    # Take the numbers apart again.
    array = group[np.searchsorted(base[group], corner, side="right") - 1]
    position = (corner - base[array])[:, None] // stride[array] % np.where(split[array], whole[array] + 1, 1)
    return array, position, weight


def _corners(rectangles: Rectangles, split: Mask, stride: Ints, base: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of the corners that count +1 and of those that count -1.

    Each array has equally many of both, so that the sorted lists stay in step, array by array.
    """
    # Begin with the first corner of each rectangle. Along each dim that is cut every corner so far gets a
    # partner at the other end of the rectangle, with the opposite sign.
    first = base[rectangles.array]
    for d in range(stride.shape[1]):
        first += rectangles.start[:, d] * stride[rectangles.array, d]
    plus, minus = first, np.zeros(0, np.int64)
    plus_row, minus_row = np.arange(len(first)), np.zeros(0, np.int64)
    for d in range(stride.shape[1]):
        cut = split[rectangles.array, d]
        if not cut.any():
            continue
        step = (rectangles.stop[:, d] - rectangles.start[:, d]) * stride[rectangles.array, d]
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
    position: Ints,
    weight: Ints,
    whole: Ints,
    split: Mask,
) -> Regions:
    """Return the faulty regions of one array: sum its corners up on the coarsest grid that has them all."""
    dims = [int(d) for d in np.flatnonzero(split[array])]
    edges = [np.unique(position[:, d]) for d in dims]
    # A cell lies between neighbouring edges of every dim; all elements of a cell are covered equally often.
    if math.prod(len(e) for e in edges) > MAX_CELLS:
        cells = np.zeros((1, len(dims)), np.int64)
        bounds = np.array([[0, len(e) - 1] for e in edges], np.int64).T
        lows, highs, count = bounds[:1], bounds[1:], np.array([-1])
    else:
        excess = np.zeros([len(e) for e in edges], np.int64)
        corners = tuple(np.searchsorted(e, position[:, d]) for e, d in zip(edges, dims, strict=True))
        np.add.at(excess, corners, weight)
        for axis in range(len(dims)):
            np.cumsum(excess, axis=axis, out=excess)
        # Now each cell has how often it is covered, minus 1.
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
        # After sorting, boxes that differ only along this axis are neighbours, in the order of positions.
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
