"""Grids and rounds of zarr saves, for generated plans: no two ranks write one file at one time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.formats.zarr.grids import Grid, GridRules, choose_grids
from megackpt.formats.zarr.rounds import find_touched_files, plan_rounds
from megackpt.geometry import Box
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata import ArraySpec
from megackpt.metadata.merge import merge_declarations
from megackpt.planning import SavePlan, plan_save
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from tests.support.effort import few

RULES = st.builds(
    GridRules,
    file_bytes=st.sampled_from([16, 64, 4096]),
    inner_bytes=st.sampled_from([0, 8, 32]),
    files_per_row=st.integers(1, 4),
)


def plan_of(layouts: list[tuple[torch.Tensor, list[OwnedChunk]]], *, ranks: int) -> SavePlan:
    declared = []
    for rank in range(ranks):
        entities: list[ShardedTensor] = [
            owned.declare(f"array {i}", array)
            for i, (array, layout) in enumerate(layouts)
            for owned in layout
            if owned.rank == rank
        ]
        declared.append(describe(entities, rank=rank))
    return plan_save(merge_declarations(declared), ranks=ranks)


@st.composite
def plans(draw: st.DrawFn) -> tuple[SavePlan, int]:
    ranks = draw(st.integers(1, 5))
    layouts = []
    for _ in range(draw(st.integers(1, 3))):
        array = draw(arrays(max_dims=3))
        layouts.append((array, draw(owned_chunks(tuple(array.shape), ranks=ranks))))
    return plan_of(layouts, ranks=ranks), ranks


def elements_of(plan: SavePlan, row: int, spec: ArraySpec) -> set[tuple[int, ...]]:
    """All elements of a row, one by one: slow and obvious."""
    dims = len(spec.global_shape)
    start, shape = plan.table.start[row, :dims].tolist(), plan.table.shape[row, :dims].tolist()
    locations = list(itertools.product(*(range(a, a + n) for a, n in zip(start, shape, strict=True))))
    return set(locations[int(plan.table.flat_start[row]) : int(plan.table.flat_stop[row])])


def files_of(plan: SavePlan, row: int, grids: list[Grid | None]) -> set[tuple[int, ...]]:
    number = int(plan.table.array[row])
    grid = grids[number]
    assert grid is not None
    locations = elements_of(plan, row, plan.table.arrays[number])
    return {(number, *(i // c for i, c in zip(location, grid.chunk, strict=True))) for location in locations}


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_and_ranks=plans(), rules=RULES)
def test_no_two_ranks_touch_one_file_in_one_round(
    plan_and_ranks: tuple[SavePlan, int], rules: GridRules
) -> None:
    plan, _ = plan_and_ranks
    grids = choose_grids(plan.table, rules)
    touches = find_touched_files(plan.table, grids)
    rounds = plan_rounds(plan, touches)
    writers: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    first: dict[tuple[int, ...], set[int]] = {}
    for row in range(len(plan.table)):
        files = files_of(plan, row, grids)
        assert len(files) == len(touches.files_of(row))
        for file in files:
            writers.setdefault((int(rounds.round[row]), file), set()).add(int(plan.writer[row]))
            first.setdefault(file, set()).add(int(rounds.round[row]))
    assert all(len(ranks) == 1 for ranks in writers.values())
    several = sorted(min(numbers) for numbers in first.values() if len(numbers) > 1)
    assert sorted(rounds.first_round.values()) == several


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_and_ranks=plans(), rules=RULES)
def test_every_row_is_in_one_round_and_no_round_is_empty(
    plan_and_ranks: tuple[SavePlan, int], rules: GridRules
) -> None:
    plan, ranks = plan_and_ranks
    touches = find_touched_files(plan.table, choose_grids(plan.table, rules))
    rounds = plan_rounds(plan, touches)
    assert rounds.count <= ranks * len(plan.table) + 1
    assert set(range(rounds.count)) == set(rounds.round.tolist()) | {0}


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_and_ranks=plans(), rules=RULES)
def test_grids_are_valid_and_never_finer_than_rows_and_sizes_ask_for(
    plan_and_ranks: tuple[SavePlan, int], rules: GridRules
) -> None:
    plan, _ = plan_and_ranks
    for number, (spec, grid) in enumerate(
        zip(plan.table.arrays, choose_grids(plan.table, rules), strict=True)
    ):
        assert grid is not None
        assert all(c >= 1 and i >= 1 and c % i == 0 for c, i in zip(grid.chunk, grid.inner, strict=True))
        files = math.prod(-(-n // c) for n, c in zip(spec.global_shape, grid.chunk, strict=True))
        rows = int((plan.table.array == number).sum())
        most = max(rules.files_per_row * rows, spec.nbytes / rules.file_bytes, 1)
        # Extents are whole numbers, which may double the count along each dim.
        assert files <= most * 2 ** (len(spec.global_shape) + 1)


@settings(max_examples=few(20, of=100), deadline=None)
@given(
    parts=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    extent=st.sampled_from([12, 24]),
    rules=RULES,
)
def test_even_tensor_parallel_splits_take_one_round(parts: list[int], extent: int, rules: GridRules) -> None:
    shape = tuple(n * extent for n in parts)
    array = torch.zeros(shape)
    cells = list(itertools.product(*map(range, parts)))
    layout = [
        OwnedChunk(
            rank,
            (Box(tuple(i * extent for i in cell), (extent,) * len(parts)), 0, extent ** len(parts)),
            0,
            0,
            False,
        )
        for rank, cell in enumerate(cells)
    ]
    plan = plan_of([(array, layout)], ranks=len(cells))
    assert plan_rounds(plan, find_touched_files(plan.table, choose_grids(plan.table, rules))).count == 1


@settings(max_examples=few(20, of=100), deadline=None)
@given(ranks=st.integers(2, 16), rows=st.integers(60, 200), columns=st.integers(1, 50))
def test_optimizer_shards_of_equal_size_take_two_rounds_at_most_in_each_file(
    ranks: int, rows: int, columns: int
) -> None:
    numel = rows * columns
    ends = [numel * rank // ranks for rank in range(ranks + 1)]
    box = Box((0, 0), (rows, columns))
    layout = [OwnedChunk(rank, (box, ends[rank], ends[rank + 1]), 0, 0, False) for rank in range(ranks)]
    plan = plan_of([(torch.zeros(rows, columns), layout)], ranks=ranks)
    grids = choose_grids(plan.table, GridRules())
    # A shard of less than a row shares it with others whatever the grid.
    in_a_row = -(-columns // (numel // ranks)) + 1
    assert plan_rounds(plan, find_touched_files(plan.table, grids)).count <= max(3, in_a_row)


def test_many_optimizer_shards_of_one_array_take_two_rounds() -> None:
    ranks, shape = 511, (4099, 4096)  # both prime to each other: shards end in the middle of rows
    ends = np.linspace(0, shape[0] * shape[1], ranks + 1).astype(int).tolist()
    box = Box((0, 0), shape)
    layout = [OwnedChunk(rank, (box, ends[rank], ends[rank + 1]), 0, 0, False) for rank in range(ranks)]
    plan = plan_of([(torch.zeros(1).expand(shape), layout)], ranks=ranks)
    grids = choose_grids(plan.table, GridRules())
    assert plan_rounds(plan, find_touched_files(plan.table, grids)).count == 2
