"""Who writes what several ranks hold, as the options say; counted in the files."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from megackpt import DeclarationError, SaveOptions, ShardedTensor, load, save
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedRank, SimulatedWorld

RANKS = 8


def state(group: SimulatedRank, *, dp: int, fill: bool) -> dict[str, ShardedTensor]:
    """Return tensors of several sizes, sharded over RANKS / dp ranks and replicated over dp."""
    tp, replica = group.rank % (RANKS // dp), group.rank // (RANKS // dp)
    made = {}
    for i in range(60):
        data = torch.full((64 + 8 * (i % 7), 32), float(i * 10 + tp) if fill else 0.0)
        made[str(i)] = ShardedTensor.from_rank_offsets(
            f"w{i}", data, (0, tp, RANKS // dp), replica_id=replica
        )
    return made


def written(store: MemoryStore) -> dict[int, int]:
    """Return the bytes of chunks in the file of each rank."""
    results = {}
    for name in store.names("data/"):
        content = store.read(name, max_bytes=1 << 30)
        results[int(name.rsplit("-", 1)[1].split(".")[0])] = (
            len(content) - 8 - struct.unpack("<Q", content[:8])[0]
        )
    return results


def saved(dp: int, spread: Any, groups: list[list[int]] | None = None) -> dict[int, int]:
    store = MemoryStore()

    def run(group: SimulatedRank) -> None:
        own_group = next((g for g in groups or [] if group.rank in g), None)
        save(
            state(group, dp=dp, fill=True),
            store,
            options=SaveOptions(spread=spread),
            group=group,
            spread_group=group.subgroup(own_group) if own_group else None,
        )
        wanted = state(group, dp=dp, fill=False)
        load(wanted, store, group=group)
        for key, true in state(group, dp=dp, fill=True).items():
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
            save(
                state(group, dp=8, fill=True),
                MemoryStore(),
                options=options,
                group=group,
                spread_group=own_group,
            )

        SimulatedWorld(2).run(rank)

    with pytest.raises(
        DeclarationError, match=r"spread_group is not given, and SaveOptions\.spread is 'group'"
    ):
        run(SaveOptions(spread="group"), subgroup=False)
    with pytest.raises(DeclarationError, match=r"spread_group is given, and SaveOptions\.spread is 'world'"):
        run(SaveOptions(), subgroup=True)
    with pytest.raises(
        DeclarationError, match=r"spread='wide' is not known\. Give one of world, group, none"
    ):
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


def test_ranks_that_spread_differently_raise_an_error() -> None:
    def run(group: SimulatedRank) -> None:
        options = SaveOptions(spread="world" if group.rank else "none")
        save(state(group, dp=8, fill=True), MemoryStore(), options=options, group=group)

    with pytest.raises(
        DeclarationError, match=r"SaveOptions\.spread is 'none' on rank 0 and 'world' on rank 1"
    ):
        SimulatedWorld(RANKS).run(run)
