"""Where a box of an array lies in the row-major order of the array: runs of bytes, as long as they can be.

Owns that decomposition, with dims merged where elements follow each other. What is done with the bytes of a
run is up to others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A box as runs of equal length, in bytes; in row-major order of `extents`, as the bytes of the box are.

    Attributes:
        nbytes: length of each run.
        first: where the first one begins in the array.
        extents: how many runs there are along each dim, each above 1; none for a single run.
        strides: how far runs that follow each other along a dim are apart.
    """

    nbytes: int
    first: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(self.extents)

    def begin_of(self, run: int) -> int:
        """Return where a run begins in the array.

        >>> runs = runs_of((0, 2), (3, 2), (3, 8), itemsize=4)
        >>> [runs.begin_of(run) for run in range(runs.count)], runs.nbytes
        ([8, 40, 72], 8)
        """
        begin = self.first
        for extent, stride in zip(reversed(self.extents), reversed(self.strides), strict=True):
            run, at = divmod(run, extent)
            begin += at * stride
        return begin


def runs_of(
    start: Sequence[int], shape: Sequence[int], global_shape: Sequence[int], *, itemsize: int
) -> Runs:
    """Return the runs of a box that lies in an array, given in elements, none of its extents 0.

    >>> runs_of((1, 0, 0), (2, 4, 8), (3, 4, 8), itemsize=2)
    Runs(nbytes=128, first=64, extents=(), strides=())
    >>> runs_of((0, 0, 6), (3, 4, 2), (3, 4, 8), itemsize=2)
    Runs(nbytes=4, first=12, extents=(12,), strides=(16,))
    """
    step = nbytes = itemsize
    first = 0
    extents: list[int] = []  # innermost first
    strides: list[int] = []
    for at, extent, whole in zip(reversed(start), reversed(shape), reversed(global_shape), strict=True):
        first += at * step
        if extent == 1:
            pass
        elif not extents and step == nbytes:
            nbytes *= extent
        elif extents and step == extents[-1] * strides[-1]:
            extents[-1] *= extent
        else:
            extents.append(extent)
            strides.append(step)
        step *= whole
    return Runs(nbytes=nbytes, first=first, extents=tuple(extents[::-1]), strides=tuple(strides[::-1]))
