"""The position of one rank in a parallel layout, as pure integers.

It tells at which index of an array over ranks the state of one rank is stored.
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

    Axes may have any names, but the same in all runs that share checkpoints. No two ranks have the same
    coordinates.

    >>> position = RankPosition(layout={"tp": 2, "dp": 4}, coordinates={"tp": 1, "dp": 3})
    >>> position.shape, position.offset, position.replica_index(["dp"])
    ((4, 2), (3, 1), 1)

    Attributes:
        layout: number of ranks along each axis.
        coordinates: this rank's index along each, from 0.

    Raises:
        DeclarationError: an axis has no index, or an index is outside of its axis.
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
                f"RankPosition has coordinates {dict(self.coordinates)} in a layout of {dict(self.layout)}. "
                f"They are outside along {', '.join(outside)}: count the ranks of an axis from 0."
            )

    @classmethod
    def of(cls, groups: ParallelGroups) -> RankPosition:
        """Return the position of the rank that has these groups, along tp, cp, dp and pp."""
        coordinates = groups.layout.coordinates(groups.rank)
        return cls(
            layout={axis: groups.layout.size(axis) for axis in RANK_ORDER},
            coordinates={axis: getattr(coordinates, axis) for axis in RANK_ORDER},
        )

    @classmethod
    def single_process(cls) -> RankPosition:
        """Return the position of the only rank of a run."""
        return cls(layout={"dp": 1}, coordinates={"dp": 0})

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, sorted by name; the order of `shape` and `offset`."""
        return tuple(sorted(self.layout))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element for each rank."""
        return tuple(self.layout[axis] for axis in self.axes)

    @property
    def offset(self) -> tuple[int, ...]:
        """The index of this rank in such an array."""
        return tuple(self.coordinates[axis] for axis in self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for an axis that the layout does not have."""
        return self.layout.get(axis, 1)

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 for an axis that the layout does not have."""
        return self.coordinates.get(axis, 0)

    def replica_index(self, axes: Iterable[str]) -> int:
        """Return this rank's number among the ranks with the same indices along `axes`.

        It is 0 on the rank whose indices along all other axes are 0.
        """
        number, fixed = 0, set(axes)
        for axis in self.axes:
            if axis not in fixed:
                number = number * self.layout[axis] + self.coordinates[axis]
        return number

    def indices_along(self, axes: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Return this rank's index along each of `axes` that the layout has, in the order given."""
        return tuple((axis, self.coordinates[axis]) for axis in axes if axis in self.coordinates)


def layout_text(layout: Mapping[str, int]) -> str:
    """Return a layout in words.

    >>> layout_text({"tp": 2, "dp": 4})
    'dp 4, tp 2'
    """
    return ", ".join(f"{axis} {layout[axis]}" for axis in sorted(layout))
