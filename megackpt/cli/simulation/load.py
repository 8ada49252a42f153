"""The load of a simulated job from what another one, or a real one, has stored.

It chooses which ranks are planned, and counts what their plans read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megackpt.cli.simulation import run_planner
from megackpt.cli.simulation.arrays import JobArrays, Model, check_layout, job_arrays
from megackpt.cli.simulation.outcome import LoadOutcome
from megackpt.cli.simulation.replica_group import ReplicaGroup, boxes_of, joined
from megackpt.cli.simulation.replicas import BUCKET_SIZE, data_parallel_groups, replica_groups
from megackpt.cli.simulation.save import Advance, StoredCheckpoint, table_nbytes
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import DeclaredChunks
from megackpt.plans.planning.load_plan import StoredPositions
from megackpt.plans.planning.read_sizes import copied_nbytes, read_nbytes
from megackpt.training.parallel import ParallelLayout


def simulate_load(
    model: Model,
    layout: ParallelLayout,
    stored: StoredCheckpoint,
    *,
    states: tuple[str, ...] | None = None,
    bucket_size: int = BUCKET_SIZE,
    ranks_planned: int | None = None,
    advance: Advance = lambda ranks: None,
) -> LoadOutcome:
    """Plan the load of the ranks of a job; return what it costs.

    ranks_planned are planned, evenly spread over the job; None: all of them. Keys that are not stored are not
    asked for.

    Raises:
        DeclarationError: the layout cannot hold the model.
        FormatError: the checkpoint lacks elements that are asked for.
    """
    check_layout(model, layout)
    arrays = job_arrays(model, tp=layout.tp, states=states)
    stages = replica_groups(model, layout, arrays, bucket_size=bucket_size)
    chosen = _chosen(layout.world_size, ranks_planned)
    is_chosen = np.zeros(layout.world_size, np.bool_)
    is_chosen[chosen] = True
    counts, positions = _Counts(), StoredPositions.of(stored.table)
    for stage in stages:
        for dense, experts in data_parallel_groups(stage):
            _count_group([dense, *(group for group, _ in experts)], arrays, stored, positions, counts)
            members = [([dense, group], ranks) for group, ranks in experts] or [([dense], dense.ranks)]
            for groups, ranks in members:
                planned = ranks[is_chosen[ranks]]
                _plan_ranks(groups, planned, arrays, stored, positions, counts)
                advance(len(planned))
    return counts.outcome(layout, chosen)


@dataclass(slots=True)
class _Counts:
    """What has been counted so far: by planned rank, and by data-parallel group."""

    rank: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    region_s: list[float] = field(default_factory=list)
    region_nbytes: int = 0
    unique: list[int] = field(default_factory=list)
    shared_read: list[int] = field(default_factory=list)

    def outcome(self, layout: ParallelLayout, planned: Ints) -> LoadOutcome:
        """Return what the load of these ranks costs; numbers of ranks in the order of ranks."""
        # Ranks were planned group by group. Numbers of groups stay in that order, those of ranks are sorted.
        order = np.argsort(np.array(self.rank, np.int64))
        return LoadOutcome(
            layout=layout,
            planned=planned,
            needed=np.array(self.needed, np.int64)[order],
            read=np.array(self.read, np.int64)[order],
            files=np.array(self.files, np.int64)[order],
            plan_s=np.array(self.plan_s, np.float64)[order],
            region_s=np.array(self.region_s, np.float64),
            region_nbytes=self.region_nbytes,
            unique=np.array(self.unique, np.int64),
            shared_read=np.array(self.shared_read, np.int64),
        )


def _count_group(
    groups: Sequence[ReplicaGroup],
    arrays: JobArrays,
    stored: StoredCheckpoint,
    positions: StoredPositions,
    counts: _Counts,
) -> None:
    """Count what ranks with the same dense weights ask for together: their flat ranges tile the boxes.

    Where etp differs from tp, some states of their experts are asked for by other ranks only, and counted
    here, too: the number is an upper bound.
    """
    boxes = _stored_only(boxes_of(groups, arrays), stored)
    region = run_planner.region_of(boxes.table, stored.table, positions)
    copies, _ = run_planner.plan_rank(boxes, region, where=stored.where)
    counts.unique.append(copied_nbytes(copies, region.table))
    counts.shared_read.append(read_nbytes(copies, region.table, block_bytes=stored.block_bytes))


def _plan_ranks(
    groups: Sequence[ReplicaGroup],
    ranks: Ints,
    arrays: JobArrays,
    stored: StoredCheckpoint,
    positions: StoredPositions,
    counts: _Counts,
) -> None:
    """Plan ranks that are members of all the groups, one by one."""
    if not len(ranks):
        return
    boxes = _stored_only(boxes_of(groups, arrays), stored)
    region = run_planner.region_of(boxes.table, stored.table, positions)
    counts.region_s.append(region.seconds)
    counts.region_nbytes = max(counts.region_nbytes, table_nbytes(region.table) + region.rows.nbytes)
    file = stored.file[region.rows]
    members = [np.searchsorted(group.ranks, ranks) for group in groups]  # ranks of a group are ascending
    for at, rank in enumerate(ranks.tolist()):
        declared = [group.declare(arrays, of[at : at + 1]) for group, of in zip(groups, members, strict=True)]
        requested = joined(declared)
        copies, seconds = run_planner.plan_rank(_stored_only(requested, stored), region, where=stored.where)
        counts.rank.append(rank)
        counts.needed.append(copied_nbytes(copies, region.table))
        counts.read.append(read_nbytes(copies, region.table, block_bytes=stored.block_bytes))
        counts.files.append(len(np.unique(file[copies.stored])))
        counts.plan_s.append(seconds)


def _stored_only(requested: DeclaredChunks, stored: StoredCheckpoint) -> DeclaredChunks:
    """Leave out arrays that are not stored."""
    known = {spec.key for spec in stored.table.arrays}
    is_known = np.array([spec.key in known for spec in requested.table.arrays], np.bool_)
    if is_known.all():
        return requested
    kept = requested.take(is_known[requested.table.array])
    number = np.cumsum(is_known) - 1
    arrays = tuple(spec for spec in kept.table.arrays if spec.key in known)
    table = replace(kept.table, arrays=arrays, array=number[kept.table.array])
    return replace(kept, table=table)


def _chosen(world: int, wanted: int | None) -> Ints:
    if wanted is None or wanted >= world:
        return np.arange(world, dtype=np.int64)
    return np.arange(wanted, dtype=np.int64) * world // max(1, wanted)
