"""Ranges of integers: one length split into ranges, and many ranges expanded into the numbers they hold."""

from __future__ import annotations

import numpy as np

from megackpt.errors import GeometryError
from megackpt.geometry.flat import Ints


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
