"""The save of a simulated job: every rank declared, planned and counted.

The steps have the order of a real save. Ranks are declared one by one, so memory is needed only for what
rank 0 of the real job would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megackpt.cli.simulation import run_planner
from megackpt.cli.simulation.arrays import JobArrays, Model, check_layout, job_arrays
from megackpt.cli.simulation.outcome import SaveOutcome, Seconds
from megackpt.cli.simulation.replica_group import ReplicaGroup, joined
from megackpt.cli.simulation.replicas import BUCKET_SIZE, replica_groups
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, PackedDeclarations
from megackpt.plans.planning import SavePlan
from megackpt.training.parallel import ParallelLayout

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
    sent = _declare_ranks(stages, arrays, layout.world_size, advance)
    plan, rows, coordinated = run_planner.plan_all(
        sent.main_lists, [data for _, data in sent.shared.values()], sent.owner_groups()
    )
    for rank, declared in each_rank(stages, arrays):
        _, seconds = run_planner.take_rows(rows[rank], declared, sent.lists[rank], rank=rank)
        sent.seconds[rank] += seconds
    del rows
    index_nbytes, index_s = run_planner.build_index(plan, world=layout.world_size)
    return _outcome(arrays, layout, plan, sent, coordinated, index_nbytes, index_s), plan


def _declare_ranks(
    stages: Sequence[Sequence[ReplicaGroup]], arrays: JobArrays, world: int, advance: Advance
) -> _Sent:
    sent = _Sent.nothing(world)
    for rank, declared in each_rank(stages, arrays):
        sent.add(rank, *run_planner.list_of(declared))
        advance(1)
    return sent


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
    """

    lists: list[PackedDeclarations]
    main_lists: list[bytes]
    shared: dict[bytes, tuple[int, bytes]]
    kind: Ints
    seconds: Seconds

    @classmethod
    def nothing(cls, world: int) -> _Sent:
        none = PackedDeclarations(np.zeros(0, np.int64), b"", b"")
        return cls([none] * world, [b""] * world, {}, np.zeros(world, np.int64), np.zeros(world))

    def add(self, rank: int, lists: PackedDeclarations, digest: bytes, seconds: float) -> None:
        number, _ = self.shared.setdefault(digest, (len(self.shared), lists.replica_rows))
        self.kind[rank] = number
        self.lists[rank], self.main_lists[rank] = (
            replace(lists, main_rows=b"", replica_rows=b""),
            lists.main_rows,
        )
        self.seconds[rank] = seconds

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
    coordinated: run_planner.CoordinatorTimes,
    index_nbytes: int,
    index_s: float,
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
        merge_s=coordinated.merge_s,
        prove_s=coordinated.prove_s,
        plan_s=coordinated.plan_s,
        pack_s=coordinated.pack_s,
        index_s=index_s,
        gathered_nbytes=sent.nbytes,
        plan_nbytes=table_nbytes(plan.table) + sum(column.nbytes for column in columns),
    )
