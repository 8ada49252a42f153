"""A plan from lists that equal ranks send once is that from the declarations of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import CoverageError, MismatchError, ShardedObject, ShardedTensor
from megackpt.errors import CheckpointError
from megackpt.mapping.describe import describe
from megackpt.metadata import (
    DeclaredChunks,
    MergedDeclarations,
    PackedDeclarations,
    merge_packed_declarations,
    pack_declarations,
)
from megackpt.metadata.merge import merge_declarations
from megackpt.options import Spread
from megackpt.planning import SavePlan, plan_merged_save, plan_save
from megackpt.testing.layouts import arrays, owned_chunks
from megackpt.validation import check_coverage

World = list[list[ShardedTensor | ShardedObject]]


def described(world: World) -> list[DeclaredChunks]:
    sizes = [[8 * (e.replica_id == 0) for e in of if isinstance(e, ShardedObject)] for of in world]
    return [describe(of, rank=rank, object_nbytes=sizes[rank]) for rank, of in enumerate(world)]


def gathered(world: Sequence[DeclaredChunks]) -> tuple[MergedDeclarations, list[PackedDeclarations]]:
    """What rank 0 learns: the second list of each kind once."""
    lists = [pack_declarations(declared, replicated=set(), on_some_ranks=set()) for declared in world]
    kinds = list(dict.fromkeys(of.replica_rows for of in lists))
    owner_groups = [np.flatnonzero([of.replica_rows == kind for of in lists]) for kind in kinds]
    merged, _ = merge_packed_declarations([of.main_rows for of in lists], kinds, owner_groups)
    return merged, lists


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Generated layouts, and tensors that are equal on groups of ranks, as on data-parallel replicas."""
    ranks = draw(st.integers(1, 6))
    world: World = [[] for _ in range(ranks)]
    for i in range(draw(st.integers(1, 3))):
        array = draw(arrays(max_dims=3))
        for owned in draw(owned_chunks(tuple(array.shape), ranks=ranks)):
            world[owned.rank].append(owned.declare(f"array {i}", array))
    tp = draw(st.sampled_from([n for n in (1, 2, 3) if ranks % n == 0]))
    for i in range(draw(st.integers(0, 4))):
        data = torch.zeros(draw(st.integers(1, 9)), 3)
        for rank, declared in enumerate(world):
            declared.insert(
                draw(st.integers(0, len(declared))),
                ShardedTensor.from_rank_offsets(f"dp {i}", data, (0, rank % tp, tp), replica_id=rank // tp),
            )
    for rank, declared in enumerate(world):
        declared.append(ShardedObject("o", None, (1,), (0,), replica_id=rank))
    return world


@given(worlds(), st.sampled_from(["world", "none", "group"]), st.sampled_from([None, 8, 100]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_plan_is_that_from_the_declarations_of_all(
    world: World, spread: Spread, part_bytes: int | None
) -> None:
    declared = described(world)
    ranks, merged = len(world), merge_declarations(declared)
    labels = np.arange(ranks) // 2
    expected = plan_save(merged, ranks=ranks, spread=spread, labels=labels, part_bytes=part_bytes)
    merged, lists = gathered(declared)
    plan = plan_merged_save(merged, spread=spread, labels=labels, part_bytes=part_bytes)
    assert plan.table.arrays == expected.table.arrays
    for column in ("array", "start", "shape", "flat_start", "flat_stop", "nbytes"):
        assert np.array_equal(getattr(plan.table, column), getattr(expected.table, column))
    assert np.array_equal(plan.writer, expected.writer)
    assert np.array_equal(plan.offset_bytes, expected.offset_bytes)
    entities = [lists[rank].entities[entity] for rank, entity in zip(plan.writer, plan.entity, strict=True)]
    assert np.array_equal(entities, expected.entity)


@given(worlds(), st.sampled_from([8, 40, 200]))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_parts_of_long_chunks_cover_them_once_and_are_written_by_their_owners(
    world: World, part_bytes: int
) -> None:
    declared = described(world)
    merged, lists = gathered(declared)
    plan = plan_merged_save(merged, part_bytes=part_bytes)
    rows = len(plan.table)
    yes, no = np.ones(rows, np.bool_), np.zeros(rows, np.bool_)
    check_coverage(DeclaredChunks(plan.table, yes, no, plan.writer, plan.entity))
    for row in range(rows):
        of_writer = declared[int(plan.writer[row])]
        entity = int(lists[int(plan.writer[row])].entities[plan.entity[row]])
        key = plan.table.arrays[int(plan.table.array[row])].key
        assert of_writer.table.arrays[int(of_writer.table.array[entity])].key == key
        assert is_inside(plan, row, of_writer, entity)


def is_inside(plan: SavePlan, row: int, declared: DeclaredChunks, entity: int) -> bool:
    part, whole, dims = plan.table, declared.table, declared.table.dims
    start, shape = part.start[row, :dims], part.shape[row, :dims]
    if np.array_equal(start, whole.start[entity]) and np.array_equal(shape, whole.shape[entity]):
        low, high = whole.flat_start[entity], whole.flat_stop[entity]
        return bool(low <= part.flat_start[row] and part.flat_stop[row] <= high)
    inside = (start >= whole.start[entity]) & (start + shape <= whole.start[entity] + whole.shape[entity])
    return bool(inside.all()) and int(part.flat_start[row]) == 0


def replicated(rows: int) -> World:
    data = torch.zeros(rows, 4)
    return [[ShardedTensor.from_rank_offsets("w", data, replica_id=rank)] for rank in range(8)]


def test_one_long_chunk_is_spread_over_all_its_owners() -> None:
    merged, _ = gathered(described(replicated(8000)))
    plan = plan_merged_save(merged, part_bytes=100)
    written = np.bincount(plan.writer, plan.table.nbytes, minlength=8)
    assert written.max() <= 1.05 * written.mean()


def test_equal_lists_are_sent_once() -> None:
    merged, _ = gathered(described(replicated(8)))
    assert len(merged.declared) == 2  # that of the main replica, and that of seven others
    assert [ranks.tolist() for ranks in merged.owner_groups] == [[0], list(range(1, 8))]


def raised(do: object, *args: object) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        do(*args)  # type: ignore[operator]
    return caught.value


def test_ranks_are_named_as_if_all_had_sent_everything() -> None:
    world = replicated(8)
    for rank in (3, 5):
        world[rank] = [ShardedTensor.from_rank_offsets("w", torch.zeros(9, 4), replica_id=rank)]
    expected = raised(merge_declarations, described(world))
    assert isinstance(expected, MismatchError)
    assert "(9, 4) on ranks 3, 5" in str(expected)
    assert str(raised(gathered, described(world))) == str(expected)

    world = replicated(8)
    world[0] = []
    merged, _ = gathered(described(world))
    error = raised(check_coverage, merged.expanded())
    assert isinstance(error, CoverageError)
    assert str(error) == str(raised(check_coverage, merge_declarations(described(world))))
