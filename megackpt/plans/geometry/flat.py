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


class Rectangles(NamedTuple):
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


def rectangles_of(shape: Ints, flat_start: Ints, flat_stop: Ints) -> Rectangles:
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
        return Rectangles(np.zeros(0, np.int64), none, none.copy())
    row = np.concatenate([c[0] for c in cut])
    order = np.argsort(row, kind="stable")  # stable: keeps the flat order inside each row
    return Rectangles(
        row[order],
        np.concatenate([c[1] for c in cut])[order],
        np.concatenate([c[2] for c in cut])[order],
    )
