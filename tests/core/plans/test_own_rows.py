"""Each rank is given the rows that it writes, and others only where the format needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import PlanCache, ShardedObject, ShardedTensor, load, save
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.geometry import Ints
from megackpt.planning import SavePlan
from megackpt.planning.save_plan import PART_BYTES
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support.states import filled, replica

RANKS = 4


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


def state(rank: int, number: int) -> dict[str, Any]:
    return {
        "w": filled(number + rank, 2, rank=rank, ranks=RANKS),
        "r": replica(number, 5, rank=rank),
        "o": ShardedObject("o", "x" * (number * 10 + rank), (RANKS,), (rank,)),
    }


@pytest.mark.parametrize("kind", [Noting, NeedsAll])
def test_a_rank_sees_and_keeps_its_own_rows_or_all_where_the_format_needs_them(kind: type[Noting]) -> None:
    store, caches = MemoryStore(), [PlanCache() for _ in range(RANKS)]

    def run(group: SimulatedRank) -> list[SavePlan]:
        seen = []
        for number in (1, 2):
            strategy = kind()
            plans = caches[group.rank]
            save(state(group.rank, number), store, strategy, group=group, plans=plans)
            assert strategy.seen is not None
            seen.append(strategy.seen)
            wanted = state(group.rank, 0)
            loaded = load(wanted, store, group=group)
            assert loaded["o"] == "x" * (number * 10 + group.rank)
            assert torch.equal(loaded["w"], torch.full((2,), number + group.rank))
        return seen

    for rank, plans in enumerate(SimulatedWorld(RANKS).run(run)):
        kept = caches[rank].peek(caches[rank].names[0])
        assert caches[rank].hits == 1
        for plan in (*plans, kept.plan):
            assert set(plan.writer.tolist()) == ({rank} if kind is Noting else set(range(RANKS)))
        assert (kept.plan_of_all_ranks is not None) == (rank == 0 and kind is Noting)
    if kind is NeedsAll:
        first, *others = SimulatedWorld(RANKS).run(run)
        for plan in others:
            for column in ("nbytes", "array", "start"):
                assert np.array_equal(getattr(plan[1].table, column), getattr(first[1].table, column))
            assert np.array_equal(plan[1].offset_bytes, first[1].offset_bytes)


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

    SimulatedWorld(RANKS).run(run)
    sizes = [len(store.read(name, max_bytes=1 << 30)) for name in store.names("data/")]
    assert len(sizes) == RANKS
    assert max(sizes) - min(sizes) <= PART_BYTES
    wanted = {key: torch.zeros_like(true) for key in ("plain", "strided", "flat", "flat whole")}
    load({key: ShardedTensor.from_rank_offsets(key, data) for key, data in wanted.items()}, store)
    stacked = declared_state(0, torch.zeros_like(true))["stacked"]
    load({"stacked": stacked}, store)
    assert torch.equal(stacked.data, true)  # type: ignore[arg-type]
    assert all(torch.equal(data, true) for data in wanted.values())


def test_a_kept_plan_of_own_rows_is_not_taken_for_one_of_all() -> None:
    store, caches = MemoryStore(), [PlanCache() for _ in range(RANKS)]

    def run(group: SimulatedRank) -> set[int]:
        plans = caches[group.rank]
        save(state(group.rank, 1), store, Noting(), group=group, plans=plans)
        strategy = NeedsAll()
        save(state(group.rank, 1), store, strategy, group=group, plans=plans)
        assert strategy.seen is not None
        return set(strategy.seen.writer.tolist())

    assert SimulatedWorld(RANKS).run(run) == [set(range(RANKS))] * RANKS
