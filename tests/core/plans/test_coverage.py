"""Declarations of all ranks, merged, and the proof that they cover each array once, against counting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import CoverageError, FormatError, MismatchError, ShardedObject, ShardedTensor, load
from megackpt.entities.describe import describe
from megackpt.errors import CheckpointError, rank_list
from megackpt.options import Spread
from megackpt.plans.geometry import Box, tiling
from megackpt.plans.geometry.tiling import Rectangles, uncovered_regions
from megackpt.plans.metadata import (
    DeclaredChunks,
    MergedDeclarations,
    PackedDeclarations,
    merge_packed_declarations,
    pack_columns,
    pack_declarations,
    unpack_columns,
)
from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
from megackpt.plans.planning import SavePlan, plan_merged_save, plan_save
from megackpt.plans.planning.replicas import keep_lowest_main
from megackpt.plans.validation import check_coverage
from megackpt.plans.validation.equality import check_common_equal
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import arrays, boxes, owned_chunks
from tests.support.declaration_faults import FAULTS, RANKS, World, is_main, outcomes_of, valid_world
from tests.support.effort import few
from tests.support.tables import Row, declared_rows
from tests.support.worlds import error_of_all, saving

RandomWorld = list[list[ShardedTensor | ShardedObject]]


def described(world: RandomWorld) -> list[DeclaredChunks]:
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
def worlds(draw: st.DrawFn) -> RandomWorld:
    """Generated layouts, and tensors that are equal on groups of ranks, as on data-parallel replicas."""
    ranks = draw(st.integers(1, 6))
    world: RandomWorld = [[] for _ in range(ranks)]
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
@settings(max_examples=few(30, of=300), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_plan_is_that_from_the_declarations_of_all(
    world: RandomWorld, spread: Spread, part_bytes: int | None
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
@settings(max_examples=few(20, of=200), deadline=None, suppress_health_check=list(HealthCheck))
def test_parts_of_long_chunks_cover_them_once_and_are_written_by_their_owners(
    world: RandomWorld, part_bytes: int
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


def replicated(rows: int) -> RandomWorld:
    data = torch.zeros(rows, 4)
    return [[ShardedTensor.from_rank_offsets("w", data, replica_id=rank)] for rank in range(8)]


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


def sent(chunks: DeclaredChunks) -> dict[str, np.ndarray]:
    return unpack_columns(pack_columns(chunks.to_columns()), where="a test")


def test_flat_ranges_of_different_boxes_are_not_joined_although_their_numbers_follow_one_another() -> None:
    upper: list[Row] = [("w", (0, 0), (2, 4), slice(0, 3)), ("w", (0, 0), (4, 2), slice(3, 8))]
    lower: list[Row] = [("w", (2, 0), (2, 4), None)]
    for rows in permutations(upper):
        with pytest.raises(CoverageError, match=r"\[2:4, 0:2\] are saved by more than one"):
            check_coverage(declared_rows({"w": (4, 4)}, *rows, *lower))


@pytest.mark.parametrize(
    "rows",
    [
        [("w", (0, 0), (4, 4), slice(8, 16)), ("w", (0, 0), (2, 4), None)],
        [("w", (0, 0), (2, 4), slice(0, 5)), ("w", (0, 0), (4, 4), slice(5, 16))],
        [("w", (0, 0), (4, 4), slice(0, 7)), ("w", (1, 0), (3, 4), slice(3, 12))],
        [("w", (0, 0), (4, 4), None), ("w", (0, 0), (4, 4), slice(0, 0)), ("w", (4, 4), (0, 0), None)],
    ],
)
def test_flat_ranges_and_boxes_of_different_shapes_may_share_an_array(rows: list[Row]) -> None:
    check_coverage(declared_rows({"w": (4, 4)}, *rows))
    with pytest.raises(CoverageError):
        check_coverage(declared_rows({"w": (4, 4)}, *rows[1:]))


@pytest.mark.parametrize("is_flat", [True, False])
def test_copies_neither_cover_anything_nor_cover_it_twice(is_flat: bool) -> None:
    cuts: list[Row] = [("w", (0, 0), (4, 4), slice(0, 7)), ("w", (0, 0), (4, 4), slice(7, 16))]
    boxes: list[Row] = [("w", (0, 0), (1, 4), None), ("w", (1, 0), (3, 4), None)]
    rows = cuts if is_flat else boxes
    twice = declared_rows({"w": (4, 4)}, *rows, *rows)
    for saved in ([0, 1], [2, 3], [0, 3]):
        check_coverage(replace(twice, main=np.isin(np.arange(4), saved)))
    for saved in ([0], [1], [0, 2], []):
        with pytest.raises(CoverageError, match=r"saved by no rank.*declare replicas"):
            check_coverage(replace(twice, main=np.isin(np.arange(4), saved)))


def test_of_equal_chunks_that_several_ranks_save_the_first_stays_and_other_arrays_do_not_change() -> None:
    rows: list[Row] = [("shared", (0,), (2,), None), ("shared", (2,), (2,), None), ("own", (0,), (4,), None)]
    saved = declared_rows({"shared": (4,), "own": (4,)}, *rows, *rows)
    assert keep_lowest_main(saved, {"shared"}).main.tolist() == [True, True, True, False, False, True]
    assert keep_lowest_main(saved, set()).main.all()


def test_arrays_of_very_many_elements_are_proved_too() -> None:
    half = 2**29
    shapes = {f"w{i:02d}": (2 * half, 2 * half) for i in range(20)}
    rows: list[Row] = [(k, (a, b), (half, half), None) for k in shapes for a in (0, half) for b in (0, half)]
    check_coverage(declared_rows(shapes, *rows))
    with pytest.raises(CoverageError) as caught:
        check_coverage(declared_rows(shapes, *[row for i, row in enumerate(rows) if i % 4 != 0]))
    for i in range(10):
        assert f"'w{i:02d}': elements [0:{half}, 0:{half}] are saved by no rank" in str(caught.value)
    assert "(20 in all)" in str(caught.value)
    with pytest.raises(CoverageError) as caught:
        check_coverage(declared_rows(shapes, *rows[:70], *rows[71:]))
    assert f"'w17': elements [{half}:{2 * half}, 0:{half}] are saved by no rank" in str(caught.value)
    assert caught.value.key == "w17"


def test_positions_sort_like_array_and_start_even_where_they_do_not_fit_into_64_bits() -> None:
    rng = np.random.default_rng(0)
    for large in (5, 2**30):
        shapes = {f"w{i}": (large, large, 4) for i in range(9)}
        keys = rng.choice(sorted(shapes), 300).tolist()
        starts = rng.integers(0, 4, (300, 3)).tolist()
        table = declared_rows(
            shapes, *[(k, tuple(s), (1, 1, 1), None) for k, s in zip(keys, starts, strict=True)]
        ).table
        locations = table.start_keys()
        order = np.lexsort((*table.start.T[::-1], table.array))
        assert (locations[order][1:] >= locations[order][:-1]).all()
        same = (np.diff(table.array[order]) == 0) & (np.diff(table.start[order], axis=0) == 0).all(axis=1)
        assert np.array_equal(np.diff(locations[order]) == 0, same)


def test_ranks_that_list_the_same_arrays_share_the_list_they_decoded() -> None:
    shapes = {"v": (2,), "w": (4, 4)}
    left = declared_rows(shapes, ("v", (0,), (2,), None), ("w", (0, 0), (2, 4), None), rank=0)
    right = declared_rows(shapes, ("w", (2, 0), (2, 4), None), rank=1)
    other = declared_rows({"u": (3,)}, ("u", (0,), (3,), None), rank=2)
    decoded = decode_declarations([sent(chunks) for chunks in (left, right, other)])
    assert decoded[0].table.arrays is decoded[1].table.arrays
    merged = merge_declarations(decoded)
    assert [spec.key for spec in merged.table.arrays] == ["u", "v", "w"]
    assert merged.table.array.tolist() == [1, 2, 2, 0]
    assert merged.rank.tolist() == [0, 0, 1, 2]
    check_coverage(merged)


def test_a_list_of_equal_bytes_but_other_extents_is_not_taken_for_a_known_one() -> None:
    wide = sent(declared_rows({"a": (2, 3), "b": (4, 5)}, ("a", (0, 0), (2, 3), None)))
    narrow = {**wide, "global_shape": wide["global_shape"].reshape(4, 1)}
    with pytest.raises(FormatError, match="declarations of rank 1: "):
        decode_declarations([wide, narrow])


@pytest.mark.parametrize(
    ("shape", "ndim"), [((-1, -4), 2), ((2**31, 2**31), 2), ((2**61, 0), 2), ((2, 2), 1)]
)
def test_a_shape_that_no_array_can_have_raises_an_error(shape: tuple[int, int], ndim: int) -> None:
    columns = sent(declared_rows({"a": (2, 2), "b": (1, 1)}))
    columns["global_shape"] = np.array([(2, 2), shape])
    columns["ndim"] = np.array([2, ndim], np.uint8)
    message = r"rank 0: 'b' has a shape that no array can have.*damaged"
    with pytest.raises(FormatError, match=message) as caught:
        decode_declarations([columns])
    assert caught.value.key == "b"


def test_conflicts_name_all_versions_with_their_ranks_and_stay_readable_for_many_ranks() -> None:
    per_rank = [declared_rows({"w": (3 if rank == 17 else 2,)}, rank=rank) for rank in range(20)]
    with pytest.raises(MismatchError) as caught:
        merge_declarations(per_rank)
    message = "'w': int8 (2,) on ranks 0-16, 18-19 (19 in all); int8 (3,) on ranks 17\n"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(8), "0, 1, 2, 3, 4, 5, 6, 7"),
        (range(1, 10), "1-9 (9 in all)"),
        (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all)"),
        ([9, *range(5), *range(12, 30), 12], "0-4, 9, 12-29 (24 in all)"),
        ([], ""),
    ],
)
def test_a_list_of_ranks_is_short_and_shows_which_are_missing(ranks: Iterable[int], text: str) -> None:
    assert rank_list(ranks) == text


def test_common_state_is_compared_by_path_and_each_difference_is_of_one_kind() -> None:
    first = {"a": "0", "b": "1", "c": "2"}
    check_common_equal([first, dict(first)])
    with pytest.raises(MismatchError) as caught:
        check_common_equal([first, {"a": "9", "c": "2"}, {**first, "d": "3"}, {**first, "a": "8"}])
    for line in (
        "'a' on rank(s) 1, 3\n",
        "'b' on rank(s) 1 (missing there)\n",
        "'d' on rank(s) 2 (missing on rank 0)\n",
    ):
        assert line in str(caught.value)
    assert (caught.value.path, caught.value.rank) == ("a", 1)


def counts_by_brute_force(parts: Rectangles, whole: np.ndarray) -> list[np.ndarray]:
    counts = [np.zeros(shape, int) for shape in whole.tolist()]
    for array, start, stop in zip(*(column.tolist() for column in parts), strict=True):
        counts[array][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
    return counts


def counts_by_regions(parts: Rectangles, whole: np.ndarray) -> list[np.ndarray]:
    counts = [np.ones(shape, int) for shape in whole.tolist()]
    for regions in uncovered_regions(parts, whole):
        for start, stop, count in zip(regions.start, regions.stop, regions.count, strict=True):
            region = counts[regions.array][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            assert region.size, "a region has elements"
            assert (region == 1).all(), "no two regions overlap"
            region[...] = count
    return counts


@st.composite
def tiled_arrays(draw: st.DrawFn) -> tuple[Rectangles, np.ndarray]:
    """Tilings of a few arrays of one number of dims, some of them spoilt."""
    dims = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.tuples(*[st.integers(0, 6)] * dims), min_size=1, max_size=4))
    rows: list[tuple[int, Box]] = []
    for array, shape in enumerate(shapes):
        tiles = [box for box in draw(boxes(shape)) if box.numel]
        for _ in range(draw(st.integers(0, 3)) if tiles else 0):
            box = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
            low = [draw(st.integers(0, n - 1)) for n in shape]
            moved = Box(
                tuple(low), tuple(draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))
            )
            tiles += draw(st.sampled_from([[], [box], [box, box], [moved], [box, moved]]))
            if not tiles:
                break
        rows += [(array, box) for box in tiles]
    order = draw(st.permutations(rows))
    empty = np.zeros((0, dims), int)
    return Rectangles(
        np.array([array for array, _ in order], int),
        np.array([box.start for _, box in order], int) if order else empty,
        np.array([box.stop for _, box in order], int) if order else empty,
    ), np.array(shapes)


@settings(max_examples=few(60, of=1000), deadline=None)
@given(tiled_arrays(), st.sampled_from([tiling.ADDRESSES, 50]))
def test_regions_are_what_counting_every_element_finds(
    world: tuple[Rectangles, np.ndarray], addresses: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "ADDRESSES", addresses)  # with few, arrays are proved in several parts
        counts = counts_by_regions(*world)
    for got, expected in zip(counts, counts_by_brute_force(*world), strict=True):
        assert np.array_equal(got, expected)


def test_too_many_faults_of_one_array_are_named_by_the_box_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "MAX_CELLS", 30)
    squares = np.array([[i, i] for i in range(2, 10)])
    (regions,) = uncovered_regions(Rectangles(np.zeros(8, int), squares, squares + 1), np.array([[12, 12]]))
    assert (regions.start.tolist(), regions.stop.tolist(), regions.count.tolist()) == (
        [[0, 0]],
        [[12, 12]],
        [-1],
    )


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), ranks=st.integers(1, 4), grid=st.lists(st.integers(1, 3), max_size=2))
def test_a_valid_world_never_raises_an_error(data: st.DataObject, ranks: int, grid: list[int]) -> None:
    entities: list[list[ShardedTensor | ShardedObject]] = [[] for _ in range(ranks)]
    for number, array in enumerate(data.draw(st.lists(arrays(), max_size=4))):
        for owned in data.draw(owned_chunks(tuple(array.shape), ranks=ranks)):
            entities[owned.rank].append(owned.declare(f"array{number}", array))
    for offset in np.ndindex(*grid):
        for replica, rank in enumerate(data.draw(st.permutations(range(ranks)))):
            entities[rank].append(ShardedObject("objects", None, tuple(grid), offset, replica))
    check_coverage(
        merge_declarations([describe(of_rank, rank=rank) for rank, of_rank in enumerate(entities)])
    )


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), array=arrays().filter(lambda a: a.numel() > 0), spoil=st.sampled_from(["drop", "double"])
)
def test_a_chunk_less_or_a_chunk_too_many_is_always_found(
    data: st.DataObject, array: torch.Tensor, spoil: str
) -> None:
    mains = [owned for owned in data.draw(owned_chunks(tuple(array.shape), ranks=3)) if owned.replica == 0]
    victim = data.draw(st.sampled_from([owned for owned in mains if owned.chunk[2] > owned.chunk[1]]))
    spoilt = [owned for owned in mains if owned is not victim] if spoil == "drop" else [*mains, victim]
    per_rank = [
        describe([owned.declare("array", array) for owned in spoilt if owned.rank == rank], rank=rank)
        for rank in range(3)
    ]
    if not any(len(declared) for declared in per_rank):
        return  # nobody declares the array at all: then there is no such array
    with pytest.raises(CoverageError) as caught:
        check_coverage(merge_declarations(per_rank))
    assert caught.value.key == "array"
    message = "by no rank" if spoil == "drop" else f"all of rank {victim.rank})"
    assert message in str(caught.value) or "more than one main replica (ranks" in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_on_every_rank_and_named_before_anything_is_written(name: str, seed: int) -> None:
    world, store = valid_world(seed), MemoryStore()
    expected = FAULTS[name](world)
    outcomes = outcomes_of(world, store)
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError), f"{name} was not found"
    raised = [o for o in outcomes if isinstance(o, expected.error)]
    assert raised, f"found as {outcomes[0]!r}"
    for text in expected.message:
        assert any(text in str(error) for error in raised), f"{text!r} is not in {raised[0]}"
    assert len({type(o) for o in outcomes}) == 1
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load({}, store)


# Changes after which everything is still saved exactly once. They must pass.


def nothing_changes(w: World) -> None:
    pass


def ranks_swap_their_boxes(w: World) -> None:
    first, second = w.tensor(0, "regular"), w.tensor(6, "regular")
    w.entities[0]["regular"], w.entities[6]["regular"] = (
        replace(first, global_offset=second.global_offset),
        replace(second, global_offset=first.global_offset),
    )


def ranks_swap_their_flat_ranges(w: World) -> None:
    w.entities[0]["flat"], w.entities[1]["flat"] = w.entities[1]["flat"], w.entities[0]["flat"]


def another_replica_is_the_main_one(w: World) -> None:
    for rank, dp in ((0, 1), (1, 0)):
        w.spoil(rank, "uneven", replica_id=(0, 0, dp))


def a_rank_cuts_its_box_in_two(w: World) -> None:
    rows = w.edges[1]
    w.spoil(0, "uneven", local_shape=(1, w.cols))
    rest = replace(w.tensor(0, "uneven"), data=None, local_shape=(rows - 1, w.cols), global_offset=(1, 0))
    rest.init_data()
    w.entities[0]["rest"] = rest


def a_copy_that_is_not_main_is_cut_otherwise(w: World) -> None:
    w.spoil(1, "regular", local_shape=(1, w.cols), axis_fragmentations=None)


def a_flat_range_is_declared_as_the_whole_block_by_one_rank(w: World) -> None:
    w.spoil(0, "flat", flattened_range=None)
    w.spoil(1, "flat", flattened_range=slice(0, 0))


def a_replica_lacks_a_key(w: World) -> None:
    del w.entities[1]["regular"]


def a_rank_with_copies_only_declares_nothing_else(w: World) -> None:
    w.entities[3] = {key: e for key, e in w.entities[3].items() if is_main(e)}


def an_array_without_elements_is_declared_by_one_rank(w: World) -> None:
    w.entities[2]["empty"] = ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3))


def keys_of_common_state_come_in_another_order(w: World) -> None:
    w.common[4] = dict(reversed(w.common[4].items()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "change",
    [
        nothing_changes,
        ranks_swap_their_boxes,
        ranks_swap_their_flat_ranges,
        another_replica_is_the_main_one,
        a_rank_cuts_its_box_in_two,
        a_copy_that_is_not_main_is_cut_otherwise,
        a_flat_range_is_declared_as_the_whole_block_by_one_rank,
        a_replica_lacks_a_key,
        a_rank_with_copies_only_declares_nothing_else,
        an_array_without_elements_is_declared_by_one_rank,
        keys_of_common_state_come_in_another_order,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_still_saved_exactly_once_raises_no_error(change: Callable[[World], None], seed: int) -> None:
    world, store = valid_world(seed), MemoryStore()
    change(world)
    assert outcomes_of(world, store) == [None] * RANKS
    wanted = copy.copy(valid_world(seed).entities[0])
    assert load({"shards": wanted}, store)["shards"]["regular"] is not None


def test_many_faults_of_each_kind_are_listed_by_their_first_ones_and_a_count() -> None:
    ranks, arrays = 2, 15

    def state_of(rank: int) -> dict[str, object]:
        keys = [f"a{i:02d}" for i in range(arrays)]
        halves = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(2), (0, 0, 2)) for key in keys}
        return {**halves, "objects": ShardedObject("objects", 0, (30,), (0,))}

    error = error_of_all(ranks, saving(state_of, MemoryStore()), CoverageError)
    assert error.key == "a00"
    assert error.rank == 0
    assert "Check global_offset and replica_id in the sharded_state_dict() of these keys" in str(error)
    missing, twice, objects, objects_twice = str(error).split("Saved ")[1:]
    assert missing.startswith("by no rank")
    assert [line for line in missing.splitlines() if "elements" in line] == [
        f"  'a{i:02d}': elements [2:4] are saved by no rank (global shape (4,)); "
        "ranks 0, 1 declare other chunks"
        for i in range(4)
    ]
    assert "... and 11 more (15 in all)" in missing
    assert twice.startswith("more than once")
    assert "'a03': elements [0:2] are saved by more than one main replica (ranks 0, 1)" in twice
    assert "... and 11 more (15 in all)" in twice
    assert "object 'objects/shard_4_30'" in objects
    assert "... and 25 more (29 in all)" in objects
    assert "object 'objects/shard_0_30' is saved by more than one main replica (ranks 0, 1)" in objects_twice


def test_conflicts_between_ranks_are_listed_all_together() -> None:
    def state_of(rank: int) -> dict[str, object]:
        keys = [f"a{i:02d}" for i in range(12)]
        return {key: ShardedTensor.from_rank_offsets(key, torch.zeros(2 + rank)) for key in keys}

    error = error_of_all(2, saving(state_of, MemoryStore()), MismatchError)
    assert "'a09': float32 (2,) on ranks 0; float32 (3,) on ranks 1" in str(error)
    assert "... and 2 more (12 in all)" in str(error)
