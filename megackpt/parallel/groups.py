"""Process groups of a parallel layout, as plain values that layers get as arguments.

There is no global registry: what needs a group takes `ParallelGroups` as an argument. Communication over
groups is in `collectives` (autograd) and `pipeline` (neighbouring stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megackpt.errors import MismatchError
from megackpt.parallel.layout import AxisName, ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One rank's view of the ranks along one axis.

    Attributes:
        size: number of ranks along the axis.
        rank: this rank's index among them, in `[0, size)`.
        ranks: their global ranks, ascending.
        group: the process group, or None when there is nothing to exchange (size 1, or groups made offline).
    """

    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None = None) -> Axis:
        """Return the axis of global `ranks` as seen from global rank `rank`, which is one of them."""
        return cls(size=len(ranks), rank=tuple(ranks).index(rank), ranks=tuple(ranks), group=group)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first along the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last along the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The ranks around one rank, for layers and optimizers.

    Attributes:
        layout: the layout of all ranks.
        rank: this global rank.
        tp: ranks with the other slices of the same layers.
        pp: ranks with the other stages of the same model replica.
        dp: ranks with the same weights.
        embedding: the first and the last stage of the same replica, which both have a tied embedding; only
            this rank itself if there is one stage, or on a stage between the two.
    """

    layout: ParallelLayout
    rank: int
    tp: Axis
    pp: Axis
    dp: Axis
    embedding: Axis

    @classmethod
    def create(cls, layout: ParallelLayout, *, backend: str | None = None) -> ParallelGroups:
        """Create this rank's groups. Collective: every rank calls it, with an equal layout.

        For a layout of one rank `torch.distributed` need not be initialised, and no group is made.

        Args:
            layout: the layout of all ranks.
            backend: backend of the new groups; None takes that of the default group.

        Raises:
            MismatchError: the number of ranks that run is not the layout's.
        """
        running = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if running else 1
        if world_size != layout.world_size:
            hint = "" if running else " torch.distributed is not initialised: call init_process_group first."
            raise MismatchError(
                f"{layout} needs {layout.world_size} ranks but {world_size} run.{hint} "
                f"ParallelLayout.infer({world_size}, tp={layout.tp}, pp={layout.pp}) gives the dp that "
                f"fits, if any."
            )
        rank = dist.get_rank() if running else 0
        # Every rank creates every group, in this order: new_group is collective over the world, and two
        # ranks that create them in different orders would wait for each other.
        axes = {name: _axis_with_group(layout.all_ranks_of(name), rank, backend) for name in _GROUPED}
        embedding = _axis_with_group(_embedding_ranks(layout), rank, backend)
        return cls(layout=layout, rank=rank, tp=axes["tp"], pp=axes["pp"], dp=axes["dp"], embedding=embedding)

    @classmethod
    def offline(cls, layout: ParallelLayout, rank: int) -> ParallelGroups:
        """Return the groups of any rank of any layout, without the means to communicate. Local, pure.

        With them one process can build the models of any number of ranks and declare their state. A
        collective over an axis larger than 1 raises an error.
        """
        embedding = [ranks for ranks in _embedding_ranks(layout) if rank in ranks] or [(rank,)]
        return cls(
            layout=layout,
            rank=rank,
            tp=Axis.of(layout.ranks_of("tp", rank), rank),
            pp=Axis.of(layout.ranks_of("pp", rank), rank),
            dp=Axis.of(layout.ranks_of("dp", rank), rank),
            embedding=Axis.of(embedding[0], rank),
        )


_GROUPED: tuple[AxisName, ...] = ("tp", "pp", "dp")


def _embedding_ranks(layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
    """Return the (first stage, last stage) pairs; tuples of one rank if there is one stage."""
    return tuple(tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in layout.all_ranks_of("pp"))


def _axis_with_group(partition: Sequence[Sequence[int]], rank: int, backend: str | None) -> Axis:
    """Create the groups of `partition`; return the axis of this rank's group. Collective."""
    axis = Axis.of((rank,), rank)
    for ranks in partition:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), backend=backend)
        if rank in ranks:
            axis = Axis.of(ranks, rank, group)
    return axis
