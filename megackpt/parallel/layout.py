"""Parallel layouts: how many ranks there are along each axis, and the coordinates of each rank.

Pure integers: no torch and no process groups (those are in `groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megackpt.errors import DeclarationError

AxisName = Literal["tp", "cp", "dp", "pp"]

# Fastest first: neighbours in tp are neighbours in rank, so that the axis that communicates most stays inside
# a node. Expert parallelism is not an axis of its own: it will regroup ranks of dp.
RANK_ORDER: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The index of one rank along each axis, each in `[0, size of the axis)`."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How many ranks there are along each axis; `tp` is the fastest in rank order, then `cp`, `dp`, `pp`.

    >>> ParallelLayout(tp=2, pp=2).coordinates(3)
    Coordinates(tp=1, cp=0, dp=0, pp=1)
    >>> ParallelLayout(tp=2, dp=2, pp=2).ranks_of("pp", 1)
    (1, 5)

    Attributes:
        tp: tensor parallel size: ranks that each have a slice of every layer.
        pp: pipeline parallel size: stages that each have some of the layers.
        dp: data parallel size: replicas of the model on different samples.
        cp: context parallel size; only 1 so far.
        ep: expert parallel size, a divisor of `dp`; only 1 so far.

    Raises:
        DeclarationError: a size below 1, or `cp` or `ep` above 1.

    Source: the rank order is Megatron-Core's default, `tp-cp-ep-dp-pp` (`parallel_state.RankGenerator`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise DeclarationError(
                    f"ParallelLayout has {name}={getattr(self, name)}, in {self}. Each size must be at "
                    f"least 1."
                )
        for name in ("cp", "ep"):
            if getattr(self, name) > 1:
                raise DeclarationError(
                    f"ParallelLayout has {name}={getattr(self, name)}, in {self}: this axis is not "
                    f"supported yet. Set {name}=1 and use the ranks for dp instead."
                )

    @classmethod
    def infer(cls, world_size: int, *, tp: int = 1, pp: int = 1) -> ParallelLayout:
        """Return the layout of `world_size` ranks whose data parallel size is what tp and pp leave.

        Raises:
            DeclarationError: `world_size` is not a multiple of `tp * pp`.
        """
        model = cls(tp=tp, pp=pp)
        if world_size < 1 or world_size % model.world_size:
            raise DeclarationError(
                f"{world_size} ranks cannot be divided among model replicas of tp={tp} x pp={pp} = "
                f"{model.world_size} ranks each. Start a multiple of {model.world_size} ranks, or change tp "
                f"or pp."
            )
        return cls(tp=tp, pp=pp, dp=world_size // model.world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`.

        Raises:
            DeclarationError: `rank` is not in `[0, world_size)`.
        """
        if not 0 <= rank < self.world_size:
            raise DeclarationError(
                f"rank {rank} does not exist in {self}, which has ranks 0 to {self.world_size - 1}. "
                f"Start {self.world_size} ranks, or give the layout of the ranks that run.",
                rank=rank,
            )
        index: dict[str, int] = {}
        rest = rank
        for name in RANK_ORDER:
            rest, index[name] = divmod(rest, self.size(name))
        return Coordinates(**index)

    def rank_at(self, coordinates: Coordinates) -> int:
        """Return the rank with these coordinates.

        Raises:
            DeclarationError: a coordinate is outside of its axis.
        """
        rank, stride = 0, 1
        for name in RANK_ORDER:
            index = getattr(coordinates, name)
            if not 0 <= index < self.size(name):
                raise DeclarationError(
                    f"{coordinates} is outside of {self}: {name} must be in [0, {self.size(name)}). Give an "
                    f"index that exists."
                )
            rank, stride = rank + index * stride, stride * self.size(name)
        return rank

    def size(self, axis: AxisName) -> int:
        """Return the number of ranks along `axis`."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return sizes[axis]

    def ranks_of(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, itself included, ascending."""
        stride = 1
        for name in RANK_ORDER[: RANK_ORDER.index(axis)]:
            stride *= self.size(name)
        first = rank - getattr(self.coordinates(rank), axis) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def all_ranks_of(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Return `ranks_of(axis, ...)` of every rank, each once, by first rank; a partition of the world."""
        leaders = (r for r in range(self.world_size) if getattr(self.coordinates(r), axis) == 0)
        return tuple(self.ranks_of(axis, leader) for leader in leaders)
