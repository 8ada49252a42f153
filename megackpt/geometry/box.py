"""Rectangles of a global array, in elements.

Owns the one-rectangle arithmetic that declarations use; `flat` has the same for many rectangles at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of an array; empty when any extent is 0.

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
        """Index of this box in an array of which it is a region.

        >>> Box((0, 4), (2, 3)).slices()
        (slice(0, 2, None), slice(4, 7, None))
        """
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major array.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
