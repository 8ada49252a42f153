"""The save of a simulated job: every rank declared, planned and counted.

Owns the order of the steps, and that no more than one independent part of the job is held in full at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable
from megackpt.planning import SavePlan
from megackpt.simulation import run_planner
from megackpt.simulation.arrays import JobArrays, job_arrays
from megackpt.simulation.layout import JobLayout
from megackpt.simulation.model import Model, check_layout
from megackpt.simulation.outcome import SaveOutcome
from megackpt.simulation.replicas import BUCKET_SIZE, ReplicaGroup, joined, replica_groups

Advance = Callable[[int], None]
"""Told how many ranks have been planned since it was called last."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
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
    layout: JobLayout,
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
    plans, mains, plan_s = [], [], 0.0
    for part in _parts(model, stages):
        declared = joined([group.declare(arrays, np.arange(len(group.ranks))) for group in part])
        plan, seconds = run_planner.plan_part(declared, ranks=layout.world)
        plans.append(plan)
        mains.append(declared.take(declared.main))
        plan_s += seconds
        advance(len(np.unique(declared.rank)))
    plan = run_planner.merge_plans(plans)
    del plans
    prove_s = run_planner.prove(joined(mains))
    del mains
    index_nbytes, index_s = run_planner.build_index(plan, world=layout.world)
    return _outcome(arrays, layout, plan, (plan_s, prove_s, index_s), index_nbytes), plan


def table_nbytes(table: ChunkTable) -> int:
    """Return the memory that the columns of a table take."""
    return sum(getattr(table, f.name).nbytes for f in fields(table) if f.name != "arrays")


def _parts(model: Model, stages: Sequence[Sequence[ReplicaGroup]]) -> list[list[ReplicaGroup]]:
    """Put stages together that hold a chunk in common: first and last, where they share the embedding."""
    parts = [list(stage) for stage in stages]
    if model.shared is not None and len(parts) > 1:
        parts[0] += parts.pop()
    return parts


def _outcome(
    arrays: JobArrays,
    layout: JobLayout,
    plan: SavePlan,
    seconds: tuple[float, float, float],
    index_nbytes: int,
) -> SaveOutcome:
    nbytes = np.zeros(layout.world, np.int64)
    np.add.at(nbytes, plan.writer, plan.table.nbytes)
    columns = (plan.writer, plan.slot, plan.offset_bytes)
    return SaveOutcome(
        layout=layout,
        nbytes=nbytes,
        chunks=np.bincount(plan.writer, minlength=layout.world).astype(np.int64),
        arrays=len(arrays.specs),
        index_nbytes=index_nbytes,
        declare_s=np.zeros(0),
        plan_s=seconds[0],
        prove_s=seconds[1],
        index_s=seconds[2],
        plan_nbytes=table_nbytes(plan.table) + sum(column.nbytes for column in columns),
    )
