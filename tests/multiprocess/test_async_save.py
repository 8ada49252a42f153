"""Asynchronous saves hold what the state was when `save` was called, and their failures are not lost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, DeclarationError, ShardedTensor, StorageError
from megackpt.comm import Group
from megackpt.formats.native import NativeSaveStrategy
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld

pytestmark = pytest.mark.multiprocess


def part(value: float) -> ShardedTensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets("w", torch.full((1000, 10), value + rank), (0, rank, ranks))


class SlowStrategy(NativeSaveStrategy):
    """Waits until it is told to write."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        assert self.go.wait(60)
        return super().write_chunks(*args, **kwargs)


class FailingStrategy(NativeSaveStrategy):
    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        if dist.get_rank() == 1:
            raise StorageError("the disk of rank 1 is full")
        return super().write_chunks(*args, **kwargs)


def save_while_training(root: Path) -> None:
    strategy = SlowStrategy()
    with Checkpointer(root, keep_last=1, async_save=True) as checkpointer:
        weight, common = part(1.0), {"lr": [0.5]}
        checkpointer.save(1, {"w": weight, "common": common}, sharded_strategy=strategy)
        assert checkpointer.is_saving
        assert checkpointer.steps() == ()
        weight.data.fill_(-1)  # training goes on, with collectives of its own, while nothing is written yet
        common["lr"][0] = -1
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        strategy.go.set()
        checkpointer.save(2, {"w": part(2.0), "common": {"lr": [0.25]}})
        checkpointer.wait()
        assert not checkpointer.is_saving
        dist.barrier()
        assert checkpointer.steps() == (2,)  # keep_last is followed after the commit


def load_first(root: Path) -> None:
    strategy = SlowStrategy()
    strategy.go.set()
    checkpointer = Checkpointer(root, async_save=True)
    weight = part(1.0)
    checkpointer.save(1, {"w": weight, "common": {"lr": 0.5}}, sharded_strategy=strategy)
    weight.data.fill_(-1)
    checkpointer.close()
    loaded = checkpointer.load({"w": part(0.0)})
    assert torch.equal(loaded["w"], part(1.0).data)
    assert loaded["common"] == {"lr": 0.5}


def fail_then_save(root: Path, look: str) -> None:
    checkpointer = Checkpointer(root, async_save=True)
    checkpointer.save(1, {"w": part(1.0)})
    checkpointer.save(2, {"w": part(2.0)}, sharded_strategy=FailingStrategy())
    began = time.monotonic()
    with pytest.raises(StorageError, match="rank 1"):
        {
            "wait": checkpointer.wait,
            "close": checkpointer.close,
            "save": lambda: checkpointer.save(3, {"w": part(3.0)}),
        }[look]()
    assert time.monotonic() - began < 30
    dist.barrier()
    assert checkpointer.steps() == (1,)
    checkpointer.save(4, {"w": part(4.0)})
    checkpointer.close()
    dist.barrier()
    assert checkpointer.steps() == (1, 4)


def test_training_goes_on_while_a_step_is_written(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_while_training, 4, tmp_path)


def test_a_step_holds_what_the_state_was_at_the_call(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(load_first, 4, tmp_path)


@pytest.mark.parametrize("look", ["wait", "save", "close"])
def test_a_failure_is_raised_on_all_ranks_at_the_next_call_and_the_next_save_works(
    rank_pool: RankPool, tmp_path: Path, look: str
) -> None:
    rank_pool.run(fail_then_save, 4, tmp_path, look)


def test_a_group_without_a_second_channel_is_refused(tmp_path: Path) -> None:

    def run(group: Group) -> None:
        data = torch.ones(2)
        state = {"w": ShardedTensor.from_rank_offsets("w", data, (0, group.rank, group.size))}
        Checkpointer(tmp_path, async_save=True, group=group).save(1, state)

    with pytest.raises(DeclarationError, match="second channel"):
        SimulatedWorld(2).run(run)


def test_staging_memory_is_kept_and_reused(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=1, async_save=True)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
    for step in range(3):
        checkpointer.save(step, state)
        assert checkpointer._staging.nbytes == 4000
    checkpointer.close()
    assert checkpointer.latest() == 2


def load_while_saving(root: Path) -> int:
    checkpointer = Checkpointer(root, keep_last=1, async_save=True)
    for step in range(1, 5):
        checkpointer.save(step, {"w": part(float(step))})
        loaded = checkpointer.load({"w": part(0.0)})  # the step that is under way
        assert torch.equal(loaded["w"], part(float(step)).data)
    checkpointer.close()
    return checkpointer.find_latest() or 0


def test_a_load_waits_for_the_step_under_way(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(load_while_saving, 2, tmp_path) == [4, 4]


def descriptors_after_many(root: Path) -> tuple[int, int]:
    def one(number: int) -> int:
        with Checkpointer(root / str(number), async_save=True) as checkpointer:
            checkpointer.save(1, {"w": part(1.0)})
        return len(os.listdir("/proc/self/fd"))

    first = one(0)
    return first, [one(number) for number in range(1, 8)][-1]


def test_a_closed_checkpointer_leaves_no_connections(rank_pool: RankPool, tmp_path: Path) -> None:
    for first, last in rank_pool.run(descriptors_after_many, 2, tmp_path):
        assert last <= first + 2
