"""One box of a global array, and the byte ranges that it has in the array's row-major order.

`flat` has the same arithmetic for many boxes at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of an array; empty if any extent is 0.

    Attributes:
        start: first element along each dim; one int per dim, in elements.
        shape: extent along each dim; one int per dim, in elements, each >= 0.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise GeometryError(
                f"Box start {self.start} has {len(self.start)} dims but shape {self.shape} has "
                f"{len(self.shape)}. Give one start per dim."
            )
        if any(x < 0 for x in (*self.start, *self.shape)):
            raise GeometryError(
                f"Box start {self.start} or shape {self.shape} is negative. Give starts and extents >= 0."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last element along each dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from its array.

        >>> Box((0, 4), (2, 3)).slices()
        (slice(0, 2, None), slice(4, 7, None))
        """
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRanges:
    """The byte ranges of a box in its array: of equal length, in row-major order.

    The bytes of the box are these ranges one after the other. Dims that follow each other without a gap are
    merged, so the ranges are as long as they can be.

    Attributes:
        nbytes: length of each range.
        first: first byte of the first range in the array.
        extents: number of ranges along each dim that is left, each above 1; empty for a single range.
        strides: distance in bytes between neighbouring ranges along each of these dims.
    """

    nbytes: int
    first: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of ranges."""
        return math.prod(self.extents)

    def begin_of(self, index: int) -> int:
        """Return the first byte of one range in the array.

        >>> ranges = box_ranges((0, 2), (3, 2), (3, 8), itemsize=4)
        >>> [ranges.begin_of(index) for index in range(ranges.count)], ranges.nbytes
        ([8, 40, 72], 8)
        """
        begin = self.first
        for extent, stride in zip(reversed(self.extents), reversed(self.strides), strict=True):
            index, at = divmod(index, extent)
            begin += at * stride
        return begin


def box_ranges(
    start: Sequence[int], shape: Sequence[int], global_shape: Sequence[int], *, itemsize: int
) -> BoxRanges:
    """Return the byte ranges of a box, which is given in elements and has no extent of 0.

    >>> box_ranges((1, 0, 0), (2, 4, 8), (3, 4, 8), itemsize=2)
    BoxRanges(nbytes=128, first=64, extents=(), strides=())
    >>> box_ranges((0, 0, 6), (3, 4, 2), (3, 4, 8), itemsize=2)
    BoxRanges(nbytes=4, first=12, extents=(12,), strides=(16,))
    """
    step = nbytes = itemsize
    first = 0
    extents: list[int] = []  # innermost first
    strides: list[int] = []
    for at, extent, whole in zip(reversed(start), reversed(shape), reversed(global_shape), strict=True):
        first += at * step
        if extent == 1:
            pass
        elif not extents and step == nbytes:  # this dim continues the range
            nbytes *= extent
        elif extents and step == extents[-1] * strides[-1]:  # its ranges continue those of the inner dim
            extents[-1] *= extent
        else:
            extents.append(extent)
            strides.append(step)
        step *= whole
    return BoxRanges(nbytes=nbytes, first=first, extents=tuple(extents[::-1]), strides=tuple(strides[::-1]))
