"""Who writes what, from all declarations or from a rank's own, and how chunks are cut for a copy."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import DeclarationError, SaveOptions, ShardedObject, ShardedTensor, load, save
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.entities.describe import describe
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, itemsizes
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.planning import SavePlan, plan_main_replicas, plan_save, with_object_sizes
from megackpt.plans.planning.assignment import FEW, assign_writers, split_long_chunks
from megackpt.plans.planning.save_plan import PART_BYTES
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import arrays, owned_chunks
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.whole.copy_source import plan_copy
from tests.support.effort import few
from tests.support.states import filled, replica, sharded
from tests.support.tables import Row, declared_rows


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
    copies = [ShardedObject("o", {}, (1,), (0,), replica_id=(rank + 1) % 3) for rank in range(3)]
    ranks = [describe([o], rank=rank, object_nbytes=[100 + rank]) for rank, o in enumerate(copies)]
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
@pytest.mark.parametrize("sizes", [3, 10, 40, 10_000])  # from many to few chunks of equal sizes and owners
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


RANKS = 8


def state(group: SimulatedRank, *, dp: int, fill: bool) -> dict[str, ShardedTensor]:
    """Return tensors of several sizes, sharded over RANKS / dp ranks and replicated over dp."""
    tp, replica = group.rank % (RANKS // dp), group.rank // (RANKS // dp)
    made = {}
    for i in range(60):
        data = torch.full((64 + 8 * (i % 7), 32), float(i * 10 + tp) if fill else 0.0)
        made[str(i)] = sharded(f"w{i}", data, (0, tp, RANKS // dp), replica_id=replica)
    return made


def written(store: MemoryStore) -> dict[int, int]:
    """Return the bytes of chunks in the file of each rank."""
    results = {}
    for name in store.names("data/"):
        content = store.read(name, max_bytes=1 << 30)
        (header,) = struct.unpack("<Q", content[:8])
        results[int(name.rsplit("-", 1)[1].split(".")[0])] = len(content) - 8 - header
    return results


def saved(dp: int, spread: Any, groups: list[list[int]] | None = None) -> dict[int, int]:
    store = MemoryStore()

    def run(group: SimulatedRank) -> None:
        own_group = next((g for g in groups or [] if group.rank in g), None)
        spread_group = group.subgroup(own_group) if own_group else None
        options = SaveOptions(spread=spread)
        full = state(group, dp=dp, fill=True)
        save(full, store, options=options, group=group, spread_group=spread_group)
        wanted = state(group, dp=dp, fill=False)
        load(wanted, store, group=group)
        for key, true in full.items():
            assert torch.equal(wanted[key].data, true.data)  # type: ignore[arg-type]

    SimulatedWorld(RANKS).run(run)
    return written(store)


SIZE = sum((64 + 8 * (i % 7)) * 32 * 4 for i in range(60))
LARGEST = (64 + 8 * 6) * 32 * 4


def test_a_fully_parallel_save_of_replicated_state_writes_each_byte_once_and_evenly() -> None:
    counts = saved(8, "world")
    assert sum(counts.values()) == SIZE
    assert len(counts) == RANKS
    mean = SIZE / RANKS
    assert all(abs(n - mean) <= max(0.05 * mean, LARGEST) for n in counts.values())


def test_within_groups_each_writes_what_its_main_replicas_are() -> None:
    # Replicas are 4 apart: {0, 4} hold one shard, and so on. Groups {0, 4}, {1, 5}, ... hold all replicas.
    counts = saved(2, "group", [[tp, tp + 4] for tp in range(4)])
    assert sum(counts.values()) == 4 * SIZE
    assert all(abs(counts[tp] - counts[tp + 4]) <= LARGEST for tp in range(4))
    # In groups of ranks 0-3 and 4-7 nobody shares a shard: the main replicas, on 0-3, write.
    counts = saved(2, "group", [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert counts == dict.fromkeys(range(4), SIZE)
    # Of eight replicas, those in the group of the main one write.
    counts = saved(8, "group", [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= LARGEST


def test_without_spreading_main_replicas_write() -> None:
    assert saved(8, "none") == {0: SIZE}
    assert saved(2, "none") == dict.fromkeys(range(4), SIZE)


def test_a_group_and_the_option_belong_together() -> None:
    def run(options: SaveOptions, subgroup: bool) -> None:
        def rank(group: SimulatedRank) -> None:
            own_group = group.subgroup([group.rank]) if subgroup else None
            full = state(group, dp=8, fill=True)
            save(full, MemoryStore(), options=options, group=group, spread_group=own_group)

        SimulatedWorld(2).run(rank)

    message = r"spread_group is not given, and SaveOptions\.spread is 'group'"
    with pytest.raises(DeclarationError, match=message):
        run(SaveOptions(spread="group"), subgroup=False)
    with pytest.raises(DeclarationError, match=r"spread_group is given, and SaveOptions\.spread is 'world'"):
        run(SaveOptions(), subgroup=True)
    message = r"spread='wide' is not known\. Give one of world, group, none"
    with pytest.raises(DeclarationError, match=message):
        SaveOptions(spread="wide")  # type: ignore[arg-type]


def test_a_kept_plan_is_not_taken_for_another_spread() -> None:
    stores = [MemoryStore(), MemoryStore()]

    def run(group: SimulatedRank) -> None:
        plans = PlanCache()
        for store, spread in zip(stores, ("world", "none"), strict=True):
            options = SaveOptions(spread=spread)  # type: ignore[arg-type]
            save(state(group, dp=8, fill=True), store, options=options, group=group, plans=plans)

    SimulatedWorld(RANKS).run(run)
    assert len(written(stores[0])) == RANKS
    assert written(stores[1]) == {0: SIZE}


def numbers_of(table: ChunkTable, row: int) -> np.ndarray:
    """Places of a chunk's elements in its array, in the order of its bytes: the slow way."""
    shape = table.arrays[int(table.array[row])].global_shape
    dims = len(shape)
    locations = np.arange(int(np.prod(shape))).reshape(shape)
    box = tuple(
        slice(a, a + n)
        for a, n in zip(table.start[row, :dims].tolist(), table.shape[row, :dims].tolist(), strict=True)
    )
    return locations[box].reshape(-1)[int(table.flat_start[row]) : int(table.flat_stop[row])]


@settings(max_examples=few(30, of=300), deadline=None)
@given(
    data=st.data(), array=arrays(max_extent=9), ranks=st.integers(1, 4), most=st.sampled_from([1, 16, 40, 99])
)
def test_parts_follow_each_other_in_the_bytes_of_their_chunk(
    data: st.DataObject, array: torch.Tensor, ranks: int, most: int
) -> None:
    owned = data.draw(owned_chunks(tuple(array.shape), ranks=ranks))
    declared = [describe([h.declare("a", array) for h in owned if h.rank == r], rank=r) for r in range(ranks)]
    table = plan_main_replicas(merge_declarations(declared)).table
    cut, of, start = split_long_chunks(table, most=most)
    width = array.element_size()
    assert (cut.nbytes <= max(most, width)).all()
    for row in range(len(table)):
        parts_of_row = np.flatnonzero(of == row)
        parts_of_row = parts_of_row[np.argsort(start[parts_of_row])]
        assert start[parts_of_row].tolist() == [0, *np.cumsum(cut.nbytes[parts_of_row]).tolist()][:-1]
        parts = [numbers_of(cut, part) for part in parts_of_row.tolist()]
        assert [len(p) * width for p in parts] == cut.nbytes[parts_of_row].tolist()
        assert np.array_equal(np.concatenate(parts), numbers_of(table, row))


@pytest.mark.parametrize(
    ("rows", "most", "step"),
    [
        (60, 25, 20),
        (22, 8, 2),  # the least divisor that is near enough
        (26, 9, 9),  # 2 is too far from 9
    ],
)
def test_chunks_of_a_grid_are_cut_into_a_grid_and_objects_stay_whole(rows: int, most: int, step: int) -> None:
    tensors = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(rows, 10), (0, rank, 3), prepend_axis_num=0)
        for rank in range(3)
    ]
    objects = [ShardedObject("o", None, (1,), (0,))]
    declared = describe([*tensors, *objects], rank=0, object_nbytes=[10**6])
    table = plan_main_replicas(declared).table
    cut, of, _ = split_long_chunks(table, most=most * 40)
    whole = [i for i, a in enumerate(cut.arrays) if a.key == "o"]
    is_object = np.isin(cut.array, whole)
    assert cut.nbytes[is_object].tolist() == [10**6]
    starts = [rank * rows + start for rank in range(3) for start in range(0, rows, step)]
    assert sorted(cut.start[~is_object, 0].tolist()) == starts
    assert len(of) == len(starts) + 1


OWNERS = 4


class Noting(NativeSaveStrategy):
    """Notes the plan that it is given to write chunks."""

    def __init__(self) -> None:
        self.seen: SavePlan | None = None

    def write_chunks(self, *args: Any, plan: SavePlan, rows: Ints, **kwargs: Any) -> bytes:
        self.seen = plan
        return super().write_chunks(*args, plan=plan, rows=rows, **kwargs)


class NeedsAll(Noting):
    """A format that does not say that own rows are enough."""

    capabilities = replace(NativeSaveStrategy.capabilities, needs_own_rows_only=False)


def owned_state(rank: int, number: int) -> dict[str, Any]:
    return {
        "w": filled(number + rank, 2, rank=rank, ranks=OWNERS),
        "r": replica(number, 5, rank=rank),
        "o": ShardedObject("o", "x" * (number * 10 + rank), (OWNERS,), (rank,)),
    }


@pytest.mark.parametrize("kind", [Noting, NeedsAll])
def test_a_rank_sees_and_keeps_its_own_rows_or_all_where_the_format_needs_them(kind: type[Noting]) -> None:
    store, caches = MemoryStore(), [PlanCache() for _ in range(OWNERS)]

    def run(group: SimulatedRank) -> list[SavePlan]:
        seen = []
        for number in (1, 2):
            strategy = kind()
            plans = caches[group.rank]
            save(owned_state(group.rank, number), store, strategy, group=group, plans=plans)
            assert strategy.seen is not None
            seen.append(strategy.seen)
            wanted = owned_state(group.rank, 0)
            loaded = load(wanted, store, group=group)
            assert loaded["o"] == "x" * (number * 10 + group.rank)
            assert torch.equal(loaded["w"], torch.full((2,), number + group.rank))
        return seen

    for rank, plans in enumerate(SimulatedWorld(OWNERS).run(run)):
        kept = caches[rank].peek(caches[rank].names[0])
        assert caches[rank].hits == 1
        for plan in (*plans, kept.plan):
            # Rank 0 writes the index from the plan of all ranks.
            has_all = kind is NeedsAll or rank == 0
            assert set(plan.writer.tolist()) == (set(range(OWNERS)) if has_all else {rank})
    if kind is NeedsAll:
        first, *others = SimulatedWorld(OWNERS).run(run)
        for plan in others:
            for column in ("array", "start"):
                assert np.array_equal(getattr(plan[1].table, column), getattr(first[1].table, column))


@pytest.mark.parametrize("kind", [Noting, NeedsAll])
def test_long_tensors_are_written_in_parts_by_all_that_hold_them(kind: type[Noting]) -> None:
    rows, store = 40 * 1024, MemoryStore()
    true = torch.arange(rows * 256, dtype=torch.int32).reshape(rows, 256)

    def declared_state(rank: int, data: torch.Tensor) -> dict[str, ShardedTensor]:
        cut = (0, rows * 256 // 3, rows * 256)
        low, high = cut[rank % 2], cut[rank % 2 + 1]
        deep = {"deep": ShardedTensor.from_rank_offsets("deep", torch.zeros(1, 1, 1, 1))}
        return {
            **(deep if rank == 1 else {}),  # arrays of one rank may have more dims than those of others
            "flat whole": ShardedTensor.from_rank_offsets_flat(
                "flat whole",
                data.reshape(-1),
                (rows, 256),
                flattened_range=slice(0, rows * 256),
                replica_id=rank,
            ),
            "plain": ShardedTensor.from_rank_offsets("plain", data, replica_id=rank),
            "stacked": ShardedTensor.from_rank_offsets(
                "stacked", data.clone(), (0, 0, 1), prepend_axis_num=1, replica_id=rank
            ),
            "strided": ShardedTensor.from_rank_offsets("strided", data.t().contiguous().t(), replica_id=rank),
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat",
                data.reshape(-1)[low:high].clone(),
                (rows, 256),
                flattened_range=slice(low, high),
                replica_id=rank // 2,
            ),
        }

    def run(group: SimulatedRank) -> None:
        save(declared_state(group.rank, true), store, kind(), group=group)

    SimulatedWorld(OWNERS).run(run)
    sizes = [len(store.read(name, max_bytes=1 << 30)) for name in store.names("data/")]
    assert len(sizes) == OWNERS
    assert max(sizes) - min(sizes) <= PART_BYTES
    wanted = {key: torch.zeros_like(true) for key in ("plain", "strided", "flat", "flat whole")}
    load({key: ShardedTensor.from_rank_offsets(key, data) for key, data in wanted.items()}, store)
    stacked = declared_state(0, torch.zeros_like(true))["stacked"]
    load({"stacked": stacked}, store)
    assert torch.equal(stacked.data, true)  # type: ignore[arg-type]
    assert all(torch.equal(data, true) for data in wanted.values())


def test_objects_of_other_sizes_move_the_offsets_of_their_ranks_only() -> None:
    def planned(sizes: list[list[int]]) -> SavePlan:
        declared = []
        for rank, of_rank in enumerate(sizes):
            tensor = ShardedTensor.from_rank_offsets("t", torch.zeros(3), (0, rank, len(sizes)))
            objects = [ShardedObject(key, None, (len(sizes),), (rank,)) for key in "op"]
            declared.append(describe([tensor, *objects], rank=rank, object_nbytes=of_rank))
        return plan_save(merge_declarations(declared), ranks=len(sizes))

    sizes = [[50, 1], [60, 2], [70, 3]]
    before, after = planned([[5, 10], [6, 20], [7, 30]]), planned(sizes)
    whole = with_object_sizes(before, {rank: np.array(of_rank) for rank, of_rank in enumerate(sizes)})
    own = with_object_sizes(before, {1: np.array(sizes[1])})
    assert np.array_equal(whole.table.nbytes, after.table.nbytes)
    assert np.array_equal(whole.offset_bytes, after.offset_bytes)
    for rank, expected in enumerate((before, after, before)):
        rows = own.rows_of(rank)
        assert np.array_equal(own.table.nbytes[rows], expected.table.nbytes[rows])
        assert np.array_equal(own.offset_bytes[rows], expected.offset_bytes[rows])
    assert before.table.nbytes.sum() == 3 * 12 + 78  # a cached plan does not change


def test_a_kept_plan_of_own_rows_is_not_taken_for_one_of_all() -> None:
    store, caches = MemoryStore(), [PlanCache() for _ in range(OWNERS)]

    def run(group: SimulatedRank) -> set[int]:
        plans = caches[group.rank]
        save(owned_state(group.rank, 1), store, Noting(), group=group, plans=plans)
        strategy = NeedsAll()
        save(owned_state(group.rank, 1), store, strategy, group=group, plans=plans)
        assert strategy.seen is not None
        return set(strategy.seen.writer.tolist())

    assert SimulatedWorld(OWNERS).run(run) == [set(range(OWNERS))] * OWNERS


def test_a_chunk_without_elements_is_not_copied() -> None:
    rows: list[Row] = [("w", (0,), (0,), None), ("w", (0,), (3,), None), ("w", (3,), (5,), None)]
    plan = plan_copy(declared_rows({"w": (8,)}, *rows).table, np.arange(3), ranks=2).plan
    assert plan.table.start[:, 0].tolist() == [0, 3]
    assert plan.table.shape[:, 0].tolist() == [3, 5]


def writers(nbytes: list[int], owners: list[list[int]], *, ranks: int) -> list[int]:
    """Return the rank that writes each chunk."""
    start = np.cumsum([0, *(len(of_chunk) for of_chunk in owners)])
    flat = np.array([rank for of_chunk in owners for rank in of_chunk])
    return flat[assign_writers(np.array(nbytes), start, flat, ranks=ranks)].tolist()


@pytest.mark.parametrize("count", [1, 3, FEW, FEW + 1, 3 * FEW + 2])
def test_chunks_of_one_size_go_to_replicas_in_turn_from_the_lowest(count: int) -> None:
    expected = [(2, 5, 7)[i % 3] for i in range(count)]
    assert writers([8] * count, [[2, 5, 7]] * count, ranks=8) == expected
