"""Parallel layouts: how many ranks there are along each axis, and the coordinates of each rank.

Pure integers: no torch and no process groups (those are in `groups`).

The same ranks have two coordinate systems. Dense layers use `(tp, cp, dp, pp)`, experts `(etp, ep, edp, pp)`.
In both, the ranks of one pipeline stage are consecutive, so that the pipeline groups are the same. Within a
stage, a group of one system may cut across the groups of the other, as it does where etp differs from tp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megackpt.errors import DeclarationError

DenseAxis: TypeAlias = Literal["tp", "cp", "dp", "pp"]
ExpertAxis: TypeAlias = Literal["etp", "ep", "edp"]
AxisName: TypeAlias = DenseAxis | ExpertAxis | Literal["dp_cp"]

# Fastest first: neighbours in tp are neighbours in rank, so that the axis that communicates most stays inside
# a node.
RANK_ORDER: tuple[DenseAxis, ...] = ("tp", "cp", "dp", "pp")
EXPERT_RANK_ORDER: tuple[DenseAxis | ExpertAxis, ...] = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The index of one rank along each axis of the dense layers, each in `[0, size of the axis)`."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoordinates:
    """The index of one rank along each axis of the experts, each in `[0, size of the axis)`."""

    etp: int = 0
    ep: int = 0
    edp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How many ranks there are along each axis; `tp` is the fastest in rank order, then `cp`, `dp`, `pp`.

    All methods are pure.

    >>> ParallelLayout(tp=2, pp=2).coordinates(3)
    Coordinates(tp=1, cp=0, dp=0, pp=1)
    >>> ParallelLayout(tp=2, dp=2, pp=2).ranks_of("pp", 1)
    (1, 5)
    >>> layout = ParallelLayout(tp=2, dp=2, ep=4, etp=1)  # experts ignore the borders of tp
    >>> layout.ranks_of("ep", 0), layout.expert_coordinates(3)
    ((0, 1, 2, 3), ExpertCoordinates(etp=0, ep=3, edp=0, pp=0))

    Attributes:
        tp: tensor parallel size: ranks that each have a slice of every dense layer.
        pp: pipeline parallel size: stages that each have some of the layers.
        dp: data parallel size: replicas of the model on different samples.
        cp: context parallel size: ranks that each have a part of every sequence. They have the same weights.
        ep: expert parallel size: ranks that each have some of the experts of every layer.
        etp: expert tensor parallel size: ranks that each have a slice of every expert; 0, the default, is
            replaced by tp.
        vpp: virtual pipeline size: model chunks of each stage, for the interleaved schedule.

    Raises:
        DeclarationError: a size below 1; `etp * ep` that does not divide the `tp * cp * dp` ranks of a stage;
            `vpp` above 1 with one stage.

    Source: the rank order of both systems is Megatron-Core's default, `tp-cp-ep-dp-pp`
    (`parallel_state.RankGenerator`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise DeclarationError(
                    f"ParallelLayout has {name}={size!r}, in {self}. Each size must be an int of at least 1."
                )
        if self.stage_size % (self.etp * self.ep):
            raise DeclarationError(
                f"etp={self.etp} x ep={self.ep} = {self.etp * self.ep} does not divide the tp={self.tp} x "
                f"cp={self.cp} x dp={self.dp} = {self.stage_size} ranks of a pipeline stage, over which the "
                f"experts of each layer are spread. Choose ep and etp whose product divides "
                f"{self.stage_size}."
            )
        if self.vpp > 1 and self.pp == 1:
            raise DeclarationError(
                f"vpp={self.vpp} interleaves the chunks of several pipeline stages, but pp is 1. Set "
                f"vpp=1, or pp to at least 2."
            )

    @classmethod
    def infer(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int = 0,
        vpp: int = 1,
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks whose data parallel size is what tp, cp and pp leave.

        Raises:
            DeclarationError: `world_size` is not a multiple of `tp * cp * pp`, or the layout cannot be.
        """
        replica = math.prod((tp, cp, pp))
        if min(tp, cp, pp) >= 1 and (world_size < 1 or world_size % replica):
            sizes = f"tp={tp} x pp={pp}" if cp == 1 else f"tp={tp} x cp={cp} x pp={pp}"
            raise DeclarationError(
                f"{world_size} ranks cannot be divided among model replicas of {sizes} = {replica} ranks "
                f"each. Start a multiple of {replica} ranks, or change "
                f"{'tp or pp' if cp == 1 else 'tp, cp or pp'}."
            )
        dp = world_size // replica if replica > 0 else 1
        return cls(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Number of ranks of each pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Expert data parallel size: ranks with the same slices of the same experts."""
        return self.stage_size // (self.etp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank` among the dense layers.

        Raises:
            DeclarationError: `rank` is not in `[0, world_size)`.
        """
        return Coordinates(**self._indices(rank, RANK_ORDER))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the coordinates of `rank` among the experts.

        Raises:
            DeclarationError: `rank` is not in `[0, world_size)`.
        """
        return ExpertCoordinates(**self._indices(rank, EXPERT_RANK_ORDER))

    def rank_at(self, coordinates: Coordinates | ExpertCoordinates) -> int:
        """Return the rank with these coordinates.

        Raises:
            DeclarationError: a coordinate is outside of its axis.
        """
        order = RANK_ORDER if isinstance(coordinates, Coordinates) else EXPERT_RANK_ORDER
        rank, stride = 0, 1
        for name in order:
            index = getattr(coordinates, name)
            if not 0 <= index < self.size(name):
                raise DeclarationError(
                    f"{coordinates} is outside of {self}: {name} must be in [0, {self.size(name)}). Give an "
                    f"index that exists."
                )
            rank, stride = rank + index * stride, stride * self.size(name)
        return rank

    def size(self, axis: AxisName) -> int:
        """Return the number of ranks along `axis`; `dp_cp` is dp and cp taken together."""
        return self.dp * self.cp if axis == "dp_cp" else int(getattr(self, axis))

    def ranks_of(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, itself included, ascending.

        "Only" refers to the coordinate system that the axis belongs to.
        """
        order, axes = _system_of(axis)
        indices = self._indices(rank, order)
        strides = {name: math.prod(map(self.size, order[:i])) for i, name in enumerate(order)}
        first = rank - sum(indices[name] * strides[name] for name in axes)
        steps = [range(0, self.size(name) * strides[name], strides[name]) for name in axes]
        return tuple(sorted(first + sum(offsets) for offsets in itertools.product(*steps)))

    def all_ranks_of(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Return `ranks_of(axis, ...)` of every rank, each once, by first rank; a partition of the world."""
        order, axes = _system_of(axis)
        leaders = (
            rank
            for rank in range(self.world_size)
            if not any(self._indices(rank, order)[name] for name in axes)
        )
        return tuple(self.ranks_of(axis, leader) for leader in leaders)

    def _indices(self, rank: int, order: Sequence[DenseAxis | ExpertAxis]) -> dict[str, int]:
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise DeclarationError(
                f"rank {rank!r} does not exist in {self}, which has ranks 0 to {self.world_size - 1}. "
                f"Start {self.world_size} ranks, or give the layout of the ranks that run.",
                rank=rank,
            )
        index: dict[str, int] = {}
        for name in order:
            rank, index[name] = divmod(rank, self.size(name))
        return index


def _system_of(
    axis: AxisName,
) -> tuple[tuple[DenseAxis | ExpertAxis, ...], tuple[DenseAxis | ExpertAxis, ...]]:
    """Return the axes of the coordinate system that `axis` belongs to, and those that it stands for."""
    if axis == "dp_cp":
        return RANK_ORDER, ("cp", "dp")
    return (RANK_ORDER if axis in RANK_ORDER else EXPERT_RANK_ORDER), (axis,)
