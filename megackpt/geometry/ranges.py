"""Ranges of integers, many at once.

Owns how ranges given in columns become the numbers that they hold.
"""

from __future__ import annotations

import numpy as np

from megackpt.geometry.flat import Ints


def joined_ranges(start: Ints | int, count: Ints) -> Ints:
    """Return the numbers `start[i]`, `start[i] + 1`, ... of every range, `count[i]` of each, in a row.

    >>> joined_ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist()
    [5, 6, 9, 10, 11]
    >>> joined_ranges(0, np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    first = np.broadcast_to(np.asarray(start, np.int64), count.shape)[count > 0]
    length = count[count > 0]
    # As steps from number to number: one pass over the result instead of five.
    steps = np.ones(int(length.sum()), np.int64)
    steps[:1] = first[:1]
    steps[np.cumsum(length)[:-1]] = first[1:] - (first + length - 1)[:-1]
    return np.cumsum(steps, out=steps)
