"""The position of one rank in a parallel layout, as pure integers.

It tells at which index of an array over ranks the state of one rank is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelGroups
from megackpt.training.parallel.layout import EXPERT_RANK_ORDER, RANK_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The sizes of all axes of a layout, and this rank's index along each. All methods are pure.

    Axes may have any names, but the same in all runs that share checkpoints. No two ranks have the same
    coordinates.

    >>> position = RankPosition(layout={"tp": 2, "dp": 4}, coordinates={"tp": 1, "dp": 3})
    >>> position.shape, position.offset, position.replica_index(["dp"])
    ((4, 2), (3, 1), 1)

    Attributes:
        layout: number of ranks along each axis.
        coordinates: this rank's index along each, from 0.
        expert_layout: number of ranks along each axis of a second coordinate system over the same ranks, that
            of experts: etp, ep, edp and pp. Empty if there is none.
        expert_coordinates: this rank's index along each of these.

    Raises:
        DeclarationError: an axis has no index, or an index is outside of its axis.
    """

    layout: Mapping[str, int]
    coordinates: Mapping[str, int]
    expert_layout: Mapping[str, int] = field(default_factory=dict)
    expert_coordinates: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layout:
            raise DeclarationError(
                "RankPosition has no axes. Give at least one, and this rank's index along it."
            )
        _check_coordinates(self.layout, self.coordinates)
        _check_coordinates(self.expert_layout, self.expert_coordinates)

    @classmethod
    def of(cls, groups: ParallelGroups) -> RankPosition:
        """Return the position of the rank that has these groups, among dense layers and among experts."""
        layout = groups.layout
        dense, expert = layout.coordinates(groups.rank), layout.expert_coordinates(groups.rank)
        return cls(
            layout={axis: layout.size(axis) for axis in RANK_ORDER},
            coordinates={axis: getattr(dense, axis) for axis in RANK_ORDER},
            expert_layout={axis: layout.size(axis) for axis in EXPERT_RANK_ORDER},
            expert_coordinates={axis: getattr(expert, axis) for axis in EXPERT_RANK_ORDER},
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

    @property
    def stored_layout(self) -> dict[str, int]:
        """The layout as it is stored with the states of ranks, and compared when they resume.

        It has ep and etp where experts are not cut as dense layers are. Checkpoints from before there was
        expert parallelism have neither.
        """
        ep, etp = self.size("ep"), self.expert_layout.get("etp", self.size("tp"))
        is_default = "ep" in self.layout or (ep == 1 and etp == self.size("tp"))
        return dict(self.layout) if is_default else {**self.layout, "ep": ep, "etp": etp}

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for an axis that the layout does not have."""
        return self.layout.get(axis, self.expert_layout.get(axis, 1))

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 for an axis that the layout does not have."""
        return self.coordinates.get(axis, self.expert_coordinates.get(axis, 0))

    def replica_index(self, axes: Iterable[str]) -> int:
        """Return this rank's number among the ranks with the same indices along `axes`.

        It is 0 on the rank whose indices along all other axes of the same coordinate system are 0.

        Raises:
            DeclarationError: the axes are not all of one coordinate system.
        """
        fixed = set(axes)
        layout, coordinates = self.layout, self.coordinates
        of_experts = sorted(fixed & (self.expert_layout.keys() - layout.keys()))
        if of_experts:
            of_dense = sorted(fixed & (layout.keys() - self.expert_layout.keys()))
            if of_dense:
                raise DeclarationError(
                    f"{', '.join(of_experts)} are axes of experts, and {', '.join(of_dense)} of dense layers:"
                    f" they cut across each other. Give axes of one kind."
                )
            layout, coordinates = self.expert_layout, self.expert_coordinates
        number = 0
        for axis in sorted(layout):
            if axis not in fixed:
                number = number * layout[axis] + coordinates[axis]
        return number

    def indices_along(self, axes: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Return this rank's index along each of `axes` that there is, in the order given.

        Where there is no etp, tp is taken for it, which is its default.
        """
        known = {**self.expert_coordinates, **self.coordinates}
        if "tp" in known:
            known.setdefault("etp", known["tp"])
        return tuple((axis, known[axis]) for axis in axes if axis in known)


def _check_coordinates(layout: Mapping[str, int], coordinates: Mapping[str, int]) -> None:
    """Raise an error if there is not one index inside of each axis."""
    if layout.keys() != coordinates.keys():
        raise DeclarationError(
            f"RankPosition has axes {sorted(layout)} and coordinates along {sorted(coordinates)}. Give this "
            f"rank's index along each axis."
        )
    outside = [axis for axis, size in layout.items() if not 0 <= coordinates[axis] < size]
    if outside:
        raise DeclarationError(
            f"RankPosition has coordinates {dict(coordinates)} in a layout of {dict(layout)}. They are "
            f"outside along {', '.join(outside)}: count the ranks of an axis from 0."
        )


def layout_text(layout: Mapping[str, int]) -> str:
    """Return a layout in words.

    >>> layout_text({"tp": 2, "dp": 4})
    'dp 4, tp 2'
    """
    return ", ".join(f"{axis} {layout[axis]}" for axis in sorted(layout))
