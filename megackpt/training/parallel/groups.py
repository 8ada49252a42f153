"""Process groups of a parallel layout, as plain values that layers get as arguments.

There is no global registry: what needs a group takes `ParallelGroups` as an argument. Communication over
groups is in `collectives` (autograd) and `pipeline` (neighbouring stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megackpt.errors import DeclarationError, MismatchError
from megackpt.ground.arguments import check_kind
from megackpt.training.parallel.layout import AxisName, ParallelLayout


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
        """Return the axis of global `ranks` as seen from global rank `rank`, which is one of them. Pure."""
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
        layout: the layout of all ranks, or of those that have a module; see `create_on`.
        rank: this rank, counted in the layout. The ranks of axes are global.
        tp: ranks with the other slices of the same layers.
        cp: ranks with the other parts of the same sequences; they have the same weights.
        pp: ranks with the other stages of the same model replica.
        dp: ranks with the same weights, and the same parts of other sequences.
        dp_cp: ranks with the same weights: dp and cp taken together.
        etp: ranks with the other slices of the same experts.
        ep: ranks with the other experts of the same layers.
        edp: ranks with the same slices of the same experts.
        embedding: the first and the last stage of the same replica, which both have a tied embedding; only
            this rank itself if there is one stage, or on a stage between the two.
        for_experts: whether tp and dp are those of experts; see `experts`.
        reserve: axes with process groups that nothing uses yet, for `with_own_process_groups` of a module
            that only some ranks have; None if all ranks have it.
    """

    layout: ParallelLayout
    rank: int
    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    dp_cp: Axis
    etp: Axis
    ep: Axis
    edp: Axis
    embedding: Axis
    for_experts: bool = False
    reserve: dict[AxisName, Axis] | None = None

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
        rank = _checked_rank(layout)
        # Every rank creates every group, in this order: new_group is collective over the world, and two
        # ranks that create them in different orders would wait for each other. Equal partitions (tp and etp,
        # usually) share their groups: each group costs memory and connections.
        axes: dict[tuple[tuple[int, ...], ...], Axis] = {}
        for partition in _partitions(layout).values():
            if partition not in axes:
                axes[partition] = _axis_with_group(partition, rank, backend)
        return cls._of(
            layout, rank, {name: axes[partition] for name, partition in _partitions(layout).items()}
        )

    @classmethod
    def create_on(
        cls, ranks: Sequence[int], layout: ParallelLayout, *, backend: str | None = None
    ) -> ParallelGroups | None:
        """Create the groups of a module that only some ranks have: an encoder, a teacher.

        Collective: every rank that runs calls it, also those without the module, and for several modules in
        the same order. Modules may share ranks.

        Args:
            ranks: the global ranks of the module, in the order of its layout.
            layout: how the module is divided over them.
            backend: backend of the new groups; None takes that of the default group.

        Returns:
            The groups of this rank; None if it is none of `ranks`.

        Raises:
            MismatchError: the number of ranks is not the layout's.
            DeclarationError: one of them occurs twice, or does not run.
        """
        of_module = _checked_ranks(ranks, layout)
        own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        partitions = {
            name: tuple(tuple(of_module[rank] for rank in members) for members in partition)
            for name, partition in _partitions(layout).items()
        }
        shared: dict[tuple[tuple[int, ...], ...], Axis] = {}
        for partition in partitions.values():
            if partition not in shared:
                shared[partition] = _axis_with_group(partition, own, backend)
        # Ranks without the module cannot take part in creating more groups later.
        reserve = {name: _axis_with_group(partitions[name], own, backend) for name in _RESERVED}
        if own not in of_module:
            return None
        axes = {name: shared[partition] for name, partition in partitions.items()}
        return replace(cls._of(layout, of_module.index(own), axes), reserve=reserve)

    @classmethod
    def offline(cls, layout: ParallelLayout, rank: int) -> ParallelGroups:
        """Return the groups of any rank of any layout, without the means to communicate. Local, pure.

        With them one process can build the models of any number of ranks and declare their state. A
        collective over an axis larger than 1 raises an error.
        """
        check_kind("layout", layout, ParallelLayout, give="ParallelLayout(tp=..., dp=...)")
        pp = layout.ranks_of("pp", rank)
        embedding = _ends(pp) if rank in _ends(pp) else (rank,)
        ranks: dict[str, tuple[int, ...]] = {name: layout.ranks_of(name, rank) for name in _AXES}
        ranks["embedding"] = embedding
        return cls._of(layout, rank, {name: Axis.of(members, rank) for name, members in ranks.items()})

    @classmethod
    def _of(cls, layout: ParallelLayout, rank: int, axes: Mapping[str, Axis]) -> ParallelGroups:
        return cls(
            layout=layout,
            rank=rank,
            tp=axes["tp"],
            cp=axes["cp"],
            pp=axes["pp"],
            dp=axes["dp"],
            dp_cp=axes["dp_cp"],
            etp=axes["etp"],
            ep=axes["ep"],
            edp=axes["edp"],
            embedding=axes["embedding"],
        )

    def with_own_process_groups(self, *axes: AxisName) -> ParallelGroups:
        """Return these groups, with process groups for `axes` that nothing else uses. Collective.

        Every rank calls it. Axes with equal ranks share a process group otherwise (dp x cp and ep, for
        instance), and collectives over one process group must be started in the same order on all ranks:
        whatever starts them at times of its own needs a process group of its own. Offline groups are returned
        as they are.
        """
        made: dict[str, Any] = {}
        for name in axes:
            group = getattr(self, name).group
            if self.reserve is not None:
                if name not in self.reserve:
                    raise DeclarationError(
                        f"The module is on some ranks only, and an optimizer that sends gradients during the "
                        f"backward pass has taken its process group of {name}. Create groups for each such "
                        f"optimizer: ParallelGroups.create_on(ranks, layout)."
                    )
                made[name] = self.reserve.pop(name)
            elif group is not None:
                partition = self.layout.all_ranks_of(name)
                made[name] = _axis_with_group(partition, self.rank, dist.get_backend(group))
        return replace(self, **made)

    @property
    def experts(self) -> ParallelGroups:
        """The ranks around this one as an expert sees them: tp is etp, dp is edp, and there is no cp.

        Layers that are made with them are sharded as experts are, and their parameters are marked for the
        optimizer. `LayerStack` and `ShardedModule.expert_axis` add the axis over the experts.
        """
        own = self.tp.ranks[self.tp.rank]
        no_cp = Axis.of((own,), own)
        return replace(self, tp=self.etp, cp=no_cp, dp=self.edp, dp_cp=self.edp, for_experts=True)


def _checked_rank(layout: ParallelLayout) -> int:
    """Return this rank, or raise an error if another number of ranks runs than the layout has."""
    running = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if running else 1
    if world_size != layout.world_size:
        hint = "" if running else " torch.distributed is not initialised: call init_process_group first."
        raise MismatchError(
            f"{layout} needs {layout.world_size} ranks but {world_size} run.{hint} "
            f"ParallelLayout.infer({world_size}, tp={layout.tp}, cp={layout.cp}, pp={layout.pp}) gives the "
            f"dp that fits, if any."
        )
    return dist.get_rank() if running else 0


def _checked_ranks(ranks: Sequence[int], layout: ParallelLayout) -> tuple[int, ...]:
    """Return the ranks of a module, or raise an error if its layout has another number or they do not run."""
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if len(ranks) != layout.world_size:
        raise MismatchError(
            f"{layout} needs {layout.world_size} ranks, but ranks={tuple(ranks)} are {len(ranks)}. Give as "
            f"many as the layout has."
        )
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        raise DeclarationError(
            f"ranks={tuple(ranks)}: each must be another one of the {world_size} that run. Give the global "
            f"ranks of the module."
        )
    return tuple(ranks)


_AXES: tuple[AxisName, ...] = ("tp", "cp", "pp", "dp", "dp_cp", "etp", "ep", "edp")


_RESERVED: tuple[AxisName, ...] = ("dp_cp", "edp")
"""The axes over which an optimizer reduces gradients during the backward pass."""


def _partitions(layout: ParallelLayout) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the partition of the world into groups for each axis, and for the tied embedding."""
    partitions: dict[str, tuple[tuple[int, ...], ...]] = {name: layout.all_ranks_of(name) for name in _AXES}
    return partitions | {"embedding": tuple(_ends(ranks) for ranks in partitions["pp"])}


def _ends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and last of the ranks of a pipeline; one rank if there is one stage."""
    return tuple(dict.fromkeys((ranks[0], ranks[-1])))


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
