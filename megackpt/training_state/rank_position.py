"""RankPosition: where one rank stands in a parallel layout, whatever made the layout.

Owns the arithmetic of places that state of single ranks is stored at; pure integers. Process groups are in
`megackpt.parallel.groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megackpt.errors import DeclarationError
from megackpt.parallel import ParallelGroups
from megackpt.parallel.layout import RANK_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The sizes of all axes of a layout, and this rank's index along each.

    Names of axes are free, but the same in all runs that share checkpoints; together they tell ranks apart.

    >>> place = RankPosition(layout={"tp": 2, "dp": 4}, coordinates={"tp": 1, "dp": 3})
    >>> place.shape, place.offset, place.copy_but(["dp"])
    ((4, 2), (3, 1), 1)

    Attributes:
        layout: number of ranks along each axis.
        coordinates: this rank's index along each, from 0.

    Raises:
        DeclarationError: an axis without an index, or an index outside of its axis.
    """

    layout: Mapping[str, int]
    coordinates: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.layout or self.layout.keys() != self.coordinates.keys():
            raise DeclarationError(
                f"RankPosition has axes {sorted(self.layout)} and coordinates along "
                f"{sorted(self.coordinates)}. Give at least one axis, and this rank's index along each."
            )
        outside = [axis for axis, size in self.layout.items() if not 0 <= self.coordinates[axis] < size]
        if outside:
            raise DeclarationError(
                f"RankPosition has coordinates {dict(self.coordinates)} in a layout of {dict(self.layout)}: "
                f"outside along {', '.join(outside)}. Count ranks of an axis from 0."
            )

    @classmethod
    def of(cls, groups: ParallelGroups) -> RankPosition:
        """Return the position of the rank that has these groups, along tp, cp, dp and pp."""
        where = groups.layout.coordinates(groups.rank)
        return cls(
            layout={axis: groups.layout.size(axis) for axis in RANK_ORDER},
            coordinates={axis: getattr(where, axis) for axis in RANK_ORDER},
        )

    @classmethod
    def alone(cls) -> RankPosition:
        """Return the position of the only rank."""
        return cls(layout={"dp": 1}, coordinates={"dp": 0})

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, by name: the order of `shape` and `offset`."""
        return tuple(sorted(self.layout))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array with an element for each rank."""
        return tuple(self.layout[axis] for axis in self.axes)

    @property
    def offset(self) -> tuple[int, ...]:
        """Place of this rank in such an array."""
        return tuple(self.coordinates[axis] for axis in self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 along one that there is not."""
        return self.layout.get(axis, 1)

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 along one that there is not."""
        return self.coordinates.get(axis, 0)

    def copy_but(self, axes: Iterable[str]) -> int:
        """Number this rank among those with the same indices along `axes`; 0 where all others are 0."""
        number, apart = 0, set(axes)
        for other in self.axes:
            if other not in apart:
                number = number * self.layout[other] + self.coordinates[other]
        return number

    def along(self, axes: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Return this rank's index along those of `axes` that there are, in the order given."""
        return tuple((axis, self.coordinates[axis]) for axis in axes if axis in self.coordinates)


def in_words(layout: Mapping[str, int]) -> str:
    """Return a layout in words.

    >>> in_words({"tp": 2, "dp": 4})
    'dp 4, tp 2'
    """
    return ", ".join(f"{axis} {layout[axis]}" for axis in sorted(layout))
