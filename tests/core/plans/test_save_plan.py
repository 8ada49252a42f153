"""Who writes what, and where: properties of the save plan over many ranks, without any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megackpt import ShardedObject, ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata import DeclaredChunks, itemsizes
from megackpt.metadata.merge import merge_declarations
from megackpt.planning import SavePlan, plan_main_replicas, plan_save
from megackpt.planning.assignment import assign_writers


def replicated_on(ranks: int, tensors: int, *, main: int = 0) -> DeclaredChunks:
    """Tensors of different sizes and dtypes that every rank holds; one of them is the main replica."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)

    def of(rank: int) -> DeclaredChunks:
        entities = [
            ShardedTensor.from_rank_offsets(
                f"t{i:03d}",
                torch.empty(17 * (1 + i % 13), dtype=dtypes[i % 4]),
                replica_id=(0, 0, (rank - main) % ranks),
            )
            for i in range(tensors)
        ]
        return describe(entities, rank=rank)

    return merge_declarations([of(rank) for rank in range(ranks)])


def bytes_of(plan: SavePlan, ranks: int) -> np.ndarray:
    return np.bincount(plan.writer, plan.table.nbytes, minlength=ranks)


def test_what_all_ranks_hold_is_written_once_and_spread_evenly_over_them() -> None:
    declared = replicated_on(8, 200)
    plan = plan_save(declared, ranks=8)
    assert len(plan.table) == 200
    written = bytes_of(plan, 8)
    assert written.max() - written.min() <= plan.table.nbytes.max()
    assert written.max() <= 1.05 * written.mean()


def test_the_plan_does_not_depend_on_which_replica_is_the_main_one() -> None:
    first, second = (plan_save(replicated_on(4, 30, main=main), ranks=4) for main in (0, 3))
    assert np.array_equal(first.writer, second.writer)
    assert np.array_equal(first.offset_bytes, second.offset_bytes)


def test_a_chunk_without_a_main_replica_is_not_written() -> None:
    whole = ShardedTensor.from_rank_offsets("t", torch.zeros(10))
    part = whole.retarget(key="t", data=torch.zeros(4), replica_id=(1, 0, 0), flattened_range=slice(0, 4))
    declared = merge_declarations([describe([whole], rank=0), describe([part], rank=1)])
    plan = plan_save(declared, ranks=2)
    assert plan.writer.tolist() == [0]
    assert plan.table.flat_stop.tolist() == [10]


def test_an_object_is_written_by_its_main_replica_since_copies_may_encode_differently() -> None:
    ranks = [
        describe(
            [ShardedObject("o", {}, (1,), (0,), replica_id=(rank + 1) % 3)],
            rank=rank,
            object_nbytes=[100 + rank],
        )
        for rank in range(3)
    ]
    plan = plan_save(merge_declarations(ranks), ranks=3)
    assert plan.writer.tolist() == [2]
    assert plan.table.nbytes.tolist() == [102]


def test_chunks_of_a_file_lie_without_gaps_and_aligned_to_their_elements() -> None:
    plan = plan_save(replicated_on(3, 50), ranks=3)
    width = itemsizes(plan.table.arrays)[plan.table.array]
    assert not (plan.offset_bytes % width).any()
    for rank in range(3):
        rows = plan.rows_of(rank)
        ends = plan.offset_bytes[rows] + plan.table.nbytes[rows]
        assert plan.offset_bytes[rows].tolist() == [0, *ends[:-1].tolist()]


def writers_one_by_one(nbytes: list[int], owners: list[list[int]], ranks: int) -> list[int]:
    """The rule: fewest owners first, then largest, each to who has least."""
    load = [0] * ranks
    writer = [0] * len(nbytes)
    for chunk in sorted(range(len(nbytes)), key=lambda c: (len(owners[c]), -nbytes[c], c)):
        writer[chunk] = min(owners[chunk], key=lambda rank: (load[rank], rank))
        load[writer[chunk]] += nbytes[chunk]
    return writer


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("sizes", [3, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_giving_out_equal_chunks_at_once_ends_like_giving_them_out_one_by_one(
    seed: int, sizes: int, *, overlapping: bool
) -> None:
    rng = np.random.default_rng(seed)
    ranks = 12
    sets = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [2, 6], [0, 1], [5], [9], [0, 4, 8], list(range(12))]
    if overlapping:
        sets += [[2, 3, 4, 5], [1, 2], [1, 5, 9]]
    owners = [sets[i] for i in rng.integers(0, len(sets), 1500)]
    nbytes = rng.integers(0, sizes, 1500) * 16
    starts = np.cumsum([0, *map(len, owners)])
    flat = np.array([rank for members in owners for rank in members])
    chosen = assign_writers(nbytes, starts, flat, ranks=ranks)
    assert (starts[:-1] <= chosen).all()
    assert (chosen < starts[1:]).all()
    assert flat[chosen].tolist() == writers_one_by_one(nbytes.tolist(), owners, ranks)


def test_a_rank_plans_its_own_main_replicas_as_in_the_plan_of_all_ranks() -> None:
    per_rank = []
    for rank in range(3):
        weight = torch.empty(5 + rank, dtype=torch.bfloat16)
        entities = [
            ShardedTensor.from_rank_offsets("a", torch.empty(4), (0, rank, 3)),
            ShardedTensor.from_rank_offsets(f"own{rank}", weight),
            ShardedTensor.from_rank_offsets("shared", torch.empty(2), replica_id=rank),
        ]
        per_rank.append(describe(entities, rank=rank))
    whole = plan_main_replicas(merge_declarations(per_rank))
    for rank, declared in enumerate(per_rank):
        own_plan = plan_main_replicas(declared)
        rows = whole.rows_of(rank)
        assert own_plan.entity[own_plan.rows_of(rank)].tolist() == whole.entity[rows].tolist()
        assert own_plan.offset_bytes[own_plan.rows_of(rank)].tolist() == whole.offset_bytes[rows].tolist()
