"""The save and the load of a simulated job: every rank declared, planned and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from megackpt.cli.simulation import run_planner
from megackpt.cli.simulation.arrays import JobArrays, Model, check_layout, job_arrays
from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome, Seconds
from megackpt.cli.simulation.replica_group import ReplicaGroup, boxes_of, joined
from megackpt.cli.simulation.replicas import BUCKET_SIZE, data_parallel_groups, replica_groups
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, PackedDeclarations
from megackpt.plans.planning import SavePlan
from megackpt.plans.planning.load_plan import StoredPositions, copied_nbytes, read_nbytes
from megackpt.training.parallel import ParallelLayout

# The save of a simulated job: every rank declared, planned and counted.
#
# The steps have the order of a real save. Ranks are declared one by one, so memory is needed only for what
# rank 0 of the real job would keep.

Advance = Callable[[int], None]
"""Told how many ranks have been planned since it was called last."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredCheckpoint:
    """What a checkpoint holds, as loads need to know it.

    Attributes:
        table: the chunks, in the order of an index.
        file: a number for the data file of each, `[n]`.
        block_bytes: reads begin and end at multiples of it in a chunk; 1: anywhere.
        where: what to call it in messages.
    """

    table: ChunkTable
    file: Ints
    block_bytes: int
    where: str


def simulate_save(
    model: Model,
    layout: ParallelLayout,
    *,
    states: tuple[str, ...] | None = None,
    bucket_size: int = BUCKET_SIZE,
    advance: Advance = lambda ranks: None,
) -> tuple[SaveOutcome, SavePlan]:
    """Plan the save of every rank of a job; return what it costs, and the plan.

    Raises:
        DeclarationError: the layout cannot hold the model.
    """
    check_layout(model, layout)
    arrays = job_arrays(model, tp=layout.tp, states=states)
    stages = replica_groups(model, layout, arrays, bucket_size=bucket_size)
    sent = _Sent.nothing(layout.world_size)
    for rank, declared in each_rank(stages, arrays):
        sent.add(rank, *run_planner.list_of(declared), len(declared))
        advance(1)
    plan, rows, times = run_planner.plan_all(
        sent.main_lists, [data for _, data in sent.shared.values()], sent.owner_groups()
    )
    for rank, declared in each_rank(stages, arrays):
        _, seconds = run_planner.take_rows(rows[rank], declared, sent.lists[rank], rank=rank)
        sent.seconds[rank] += seconds
    del rows
    index_nbytes, times["index_s"] = run_planner.build_index(plan, world=layout.world_size)
    return _outcome(arrays, layout, plan, sent, index_nbytes, times), plan


def each_rank(
    stages: Sequence[Sequence[ReplicaGroup]], arrays: JobArrays
) -> Iterator[tuple[int, DeclaredChunks]]:
    """Yield every rank of a job and what it declares."""
    for stage in stages:
        groups_of: dict[int, list[tuple[ReplicaGroup, int]]] = {}
        for group in stage:
            for at, rank in enumerate(group.ranks.tolist()):
                groups_of.setdefault(rank, []).append((group, at))
        for rank, memberships in groups_of.items():
            yield rank, joined([group.declare(arrays, np.array([at])) for group, at in memberships])


@dataclass(slots=True)
class _Sent:
    """What rank 0 has received, and how long sending it took each rank, in s.

    Attributes:
        lists: of each rank; the bytes of its shared list are left out.
        main_lists: the first list of each rank.
        shared: the different second ones and their numbers, by their digests.
        kind: which of these each rank has, `[world]`.
        seconds: `[world]`.
        declared: how many chunks each rank declares, `[world]`.
    """

    lists: list[PackedDeclarations]
    main_lists: list[bytes]
    shared: dict[bytes, tuple[int, bytes]]
    kind: Ints
    seconds: Seconds
    declared: Ints

    @classmethod
    def nothing(cls, world: int) -> _Sent:
        none = PackedDeclarations(np.zeros(0, np.int64), b"", b"")
        numbers = np.zeros(world, np.int64)
        return cls([none] * world, [b""] * world, {}, numbers, np.zeros(world), numbers.copy())

    def add(self, rank: int, lists: PackedDeclarations, digest: bytes, seconds: float, count: int) -> None:
        number, _ = self.shared.setdefault(digest, (len(self.shared), lists.replica_rows))
        self.kind[rank] = number
        self.lists[rank], self.main_lists[rank] = (
            replace(lists, main_rows=b"", replica_rows=b""),
            lists.main_rows,
        )
        self.seconds[rank], self.declared[rank] = seconds, count

    def owner_groups(self) -> list[Ints]:
        return [np.flatnonzero(self.kind == kind) for kind in range(len(self.shared))]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.main_lists)) + sum(len(data) for _, data in self.shared.values())


def table_nbytes(table: ChunkTable) -> int:
    """Return the memory that the columns of a table take."""
    return sum(getattr(table, f.name).nbytes for f in fields(table) if f.name != "arrays")


def _outcome(
    arrays: JobArrays,
    layout: ParallelLayout,
    plan: SavePlan,
    sent: _Sent,
    index_nbytes: int,
    times: Mapping[str, float],
) -> SaveOutcome:
    nbytes = np.zeros(layout.world_size, np.int64)
    np.add.at(nbytes, plan.writer, plan.table.nbytes)
    columns = (plan.writer, plan.entity, plan.offset_bytes)
    return SaveOutcome(
        layout=layout,
        nbytes=nbytes,
        chunks=np.bincount(plan.writer, minlength=layout.world_size).astype(np.int64),
        arrays=len(arrays.specs),
        index_nbytes=index_nbytes,
        rank_s=sent.seconds,
        describe_s=sent.declared * np.float64(run_planner.seconds_per_chunk()),
        gathered_nbytes=sent.nbytes,
        plan_nbytes=table_nbytes(plan.table) + sum(column.nbytes for column in columns),
        **times,
    )


# The load of a simulated job from what another one, or a real one, has stored.
#
# It chooses which ranks are planned, and counts what their plans read.


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
    counts = _Counts(arrays, stored, StoredPositions.of(stored.table))
    for stage in stages:
        for dense, experts in data_parallel_groups(stage):
            counts.add_group([dense, *(group for group, _ in experts)])
            members = [([dense, group], ranks) for group, ranks in experts] or [([dense], dense.ranks)]
            for groups, ranks in members:
                planned = ranks[is_chosen[ranks]]
                counts.add_ranks(groups, planned)
                advance(len(planned))
    return counts.outcome(layout, chosen)


@dataclass(slots=True)
class _Counts:
    """What has been counted so far: by planned rank, and by data-parallel group."""

    arrays: JobArrays
    stored: StoredCheckpoint
    positions: StoredPositions
    rank: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    region_s: list[float] = field(default_factory=list)
    region_nbytes: int = 0
    unique: list[int] = field(default_factory=list)
    shared_read: list[int] = field(default_factory=list)

    def add_group(self, groups: Sequence[ReplicaGroup]) -> None:
        """Count what ranks with the same dense weights ask for together: their flat ranges tile the boxes.

        Where etp differs from tp, some states of their experts are asked for by other ranks only, and counted
        here, too: the number is an upper bound.
        """
        boxes, region = self._region_of(groups)
        copies, _ = run_planner.plan_rank(boxes, region, where=self.stored.where)
        self.unique.append(copied_nbytes(copies, region.table))
        self.shared_read.append(read_nbytes(copies, region.table, block_bytes=self.stored.block_bytes))

    def add_ranks(self, groups: Sequence[ReplicaGroup], ranks: Ints) -> None:
        """Plan ranks that are members of all the groups, one by one."""
        if not len(ranks):
            return
        stored, (_, region) = self.stored, self._region_of(groups)
        self.region_s.append(region.seconds)
        self.region_nbytes = max(self.region_nbytes, table_nbytes(region.table) + region.rows.nbytes)
        file = stored.file[region.rows]
        members = [np.searchsorted(group.ranks, ranks) for group in groups]  # ranks of a group are ascending
        for at, rank in enumerate(ranks.tolist()):
            pairs = zip(groups, members, strict=True)
            requested = joined([group.declare(self.arrays, of[at : at + 1]) for group, of in pairs])
            asked = _stored_only(requested, stored)
            copies, seconds = run_planner.plan_rank(asked, region, where=stored.where)
            self.rank.append(rank)
            self.needed.append(copied_nbytes(copies, region.table))
            self.read.append(read_nbytes(copies, region.table, block_bytes=stored.block_bytes))
            self.files.append(len(np.unique(file[copies.stored])))
            self.plan_s.append(seconds)

    def _region_of(self, groups: Sequence[ReplicaGroup]) -> tuple[DeclaredChunks, run_planner.Region]:
        """Return what groups ask for together, and the stored chunks that overlap it."""
        boxes = _stored_only(boxes_of(groups, self.arrays), self.stored)
        return boxes, run_planner.region_of(boxes.table, self.stored.table, self.positions)

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
