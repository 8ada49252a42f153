"""Ranges of integers, and integers as sort keys.

One length is split into ranges; many ranges are expanded into the numbers they hold. Sort keys are integers
that sort and compare as several columns do, since sorting one column is many times faster.
"""

from __future__ import annotations

import numpy as np

from megackpt.errors import GeometryError
from megackpt.plans.geometry.flat import Ints


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
