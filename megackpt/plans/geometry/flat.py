"""Flat ranges of boxes as rectangles, for many boxes at once.

A distributed optimizer has a contiguous range `[start, stop)` of the row-major flattening of a box. In n dims
such a range is at most `2 n - 1` rectangles: tail rows of the first slab, whole slabs, head rows of the last.
Each of them is contiguous in the flat buffer. Everything here works on int64 numpy arrays, one row a box, so
that a plan for a million boxes takes a few vector operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.errors import GeometryError

Ints = npt.NDArray[np.int64]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in elements.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class CutRectangles(NamedTuple):
    """Rectangles cut from rows of boxes.

    Attributes:
        row: the input row that each rectangle belongs to, `[m]`, ascending, and in flat order within a row.
        start: first element relative to the origin of that row's box, `[m, n]`.
        shape: extents, `[m, n]`, all >= 1.
    """

    row: Ints
    start: Ints
    shape: Ints


def strides_of(shape: Ints) -> Ints:
    """Return the row-major strides of each row's box, in elements; shape is `[m, n]`, as is the result."""
    strides = np.ones_like(shape)
    for dim in range(shape.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shape[:, dim + 1]
    return strides


def rectangles_of(shape: Ints, flat_start: Ints, flat_stop: Ints) -> CutRectangles:
    """Cut each row's flat range into rectangles; empty ranges give none.

    shape is `[m, n]` (n >= 1), flat_start and flat_stop are `[m]` with `0 <= start <= stop <= prod(shape)`.

    >>> r = rectangles_of(np.array([[3, 4]]), np.array([2]), np.array([9]))
    >>> [(tuple(map(int, a)), tuple(map(int, b))) for a, b in zip(r.start, r.shape)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    dims = shape.shape[1]
    strides = strides_of(shape)
    position = flat_start.astype(np.int64, copy=True)
    cut: list[tuple[Ints, Ints, Ints]] = []  # (rows, start, shape), in flat order for each row

    def emit(rows: Ints, dim: int, stop: Ints) -> None:
        """Add the slabs `[position, stop)` of `dim`: both ends are multiples of that dim's stride."""
        begin = position[rows]
        start = (begin[:, None] // strides[rows]) % shape[rows]
        extent = np.ones_like(start)
        extent[:, dim] = (stop - begin) // strides[rows, dim]
        extent[:, dim + 1 :] = shape[rows, dim + 1 :]
        cut.append((rows, start, extent))
        position[rows] = stop

    # Heads, innermost dim first: complete the slab if the range begins in the middle of one.
    climbing = flat_stop > flat_start
    for dim in range(dims - 1, 0, -1):
        slab = np.maximum(strides[:, dim - 1], 1)
        boundary = -(-position // slab) * slab
        climbing &= boundary <= flat_stop
        rows = np.flatnonzero(climbing & (boundary > position))
        if rows.size:
            emit(rows, dim, boundary[rows])
    # Middle and tails, outermost dim first: as many whole slabs of each dim as still fit.
    for dim in range(dims):
        slab = np.maximum(strides[:, dim], 1)
        boundary = flat_stop // slab * slab
        rows = np.flatnonzero((boundary > position) & (flat_stop > flat_start))
        if rows.size:
            emit(rows, dim, boundary[rows])

    if not cut:
        none = np.zeros((0, dims), np.int64)
        return CutRectangles(np.zeros(0, np.int64), none, none.copy())
    row = np.concatenate([c[0] for c in cut])
    order = np.argsort(row, kind="stable")  # stable: keeps the flat order inside each row
    return CutRectangles(
        row[order],
        np.concatenate([c[1] for c in cut])[order],
        np.concatenate([c[2] for c in cut])[order],
    )


# Ranges of integers, and integers as sort keys.
#
# One length is split into ranges; many ranges are expanded into the numbers they hold. Sort keys are integers
# that sort and compare as several columns do, since sorting one column is many times faster.


def split_range(length: int, *, parts: int, index: int) -> tuple[int, int]:
    """Return range `index` of `length` elements split into `parts` ranges, as `(start, stop)`.

    The first `length % parts` ranges are one element longer, as in `torch.tensor_split`.

    >>> [split_range(10, parts=4, index=i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]

    Raises:
        GeometryError: length is negative, parts is below 1, or index is not in `[0, parts)`.
    """
    if length < 0 or parts < 1 or not 0 <= index < parts:
        raise GeometryError(
            f"Cannot take part {index} of {length} elements in {parts} parts. "
            f"Give length >= 0, parts >= 1 and 0 <= index < parts."
        )
    size, longer = divmod(length, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def joined_ranges(start: Ints | int, count: Ints) -> Ints:
    """Return the numbers of all ranges, one range after the other: `start[i]` to `start[i] + count[i] - 1`.

    >>> joined_ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist()
    [5, 6, 9, 10, 11]
    >>> joined_ranges(0, np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    first = np.broadcast_to(np.asarray(start, np.int64), count.shape)[count > 0]
    length = count[count > 0]
    # Write the step from each number to the next, 1 within a range, and sum up: one pass instead of five.
    steps = np.ones(int(length.sum()), np.int64)
    steps[:1] = first[:1]
    steps[np.cumsum(length)[:-1]] = first[1:] - (first + length - 1)[:-1]
    return np.cumsum(steps, out=steps)


def position_bases(extent: Ints) -> tuple[Ints, int]:
    """Return bases and a bound with which `(array, position)` becomes one integer.

    For `0 <= position <= extent[array]`, `bases[array] + min(position, bound)` sorts as `(array, position)`.
    Positions beyond the bound compare as equal; the bound is below an extent only where there are many arrays
    of absurd lengths. extent and bases are `[arrays]`.
    """
    bound = 2**62 // (len(extent) + 1) - 2
    room = np.minimum(extent, bound) + 2
    bases: Ints = np.cumsum(room) - room
    return bases, bound


def lexicographic_keys(array: Ints, values: Ints, radix: Ints) -> Ints:
    """Return one integer a row that sorts as `(array, *values)`, `[n]`; `0 <= values < radix[array]`.

    array is `[n]`, values `[n, dims]`, radix `[arrays, dims]`.
    """
    # A product of floats does not overflow. Where it is below this bound, that of integers does not either.
    if radix.prod(axis=1, dtype=float).sum() > 2.0**62:
        return _dense_ranks(array, values)
    # A key is a number with one digit per dim; the numbers of each array follow those of the array before.
    sizes = radix.prod(axis=1)
    weight = np.cumprod(np.column_stack((radix[:, 1:], np.ones(len(radix), np.int64)))[:, ::-1], axis=1)[
        :, ::-1
    ]
    ends = np.cumsum(sizes)
    keys: Ints = (ends - sizes)[array] if len(ends) else np.zeros(0, np.int64)
    for d in range(values.shape[1]):
        keys += values[:, d] * weight[array, d]
    return keys


def _dense_ranks(array: Ints, values: Ints) -> Ints:
    """Return keys found by sorting the columns, for positions that do not fit into 64 bits."""
    order = np.lexsort((*values.T[::-1], array))
    differs = np.ones(len(array), np.int64)
    differs[1:] = (np.diff(array[order]) != 0) | (np.diff(values[order], axis=0) != 0).any(axis=1)
    keys = np.empty(len(array), np.int64)
    keys[order] = np.cumsum(differs)
    return keys
