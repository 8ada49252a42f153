"""When one rank fails, dies or hangs, every rank raises one error that names it, before the deadline.

When one rank receives a signal, all save the same step and exit with the same code.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import megackpt
from megackpt import (
    Checkpointer,
    CheckpointError,
    IntegrityError,
    RankFailedError,
    SaveOptions,
    SaveSchedule,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.comm import missing_ranks
from megackpt.testing.ranks import RankPool
from tests.support.checkpoints import flip
from tests.support.states import filled
from tests.support.writers import wait_for


def shard(value: float = 1.0, numel: int = 4096) -> ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return filled(value, numel, rank=rank, ranks=size)


def save_well(directory: Path) -> None:
    megackpt.save({"w": shard(1.0)}, directory)


def save_while_rank_1_sleeps(directory: Path) -> None:
    options = SaveOptions(timeout_s=3)
    megackpt.save({"w": shard()}, directory, options=options)  # agree on the group
    raised = [directory.with_name(f"raised.{rank}") for rank in (0, 2)]
    if dist.get_rank() == 1:
        wait_for(lambda: all(file.exists() for file in raised))
    try:
        megackpt.save({"w": shard()}, directory, options=options)
    finally:
        directory.with_name(f"raised.{dist.get_rank()}").touch()


def load_again(directory: Path) -> None:
    megackpt.load({"w": shard(0.0)}, directory)


def test_a_rank_that_is_stuck_is_named_before_the_deadline(rank_pool: RankPool, tmp_path: Path) -> None:
    first, stuck, last = rank_pool.outcomes(save_while_rank_1_sleeps, 3, tmp_path / "c")
    for outcome in (first, last):  # who waits for ever raises a TimeoutError of the pool
        assert isinstance(outcome.error, RankFailedError)
        assert "No answer from rank(s) 1 within 3 s" in str(outcome.error)
        assert "Raise timeout_s" in str(outcome.error)
    assert isinstance(stuck.error, CheckpointError)


def test_damage_in_the_chunk_of_one_rank_is_raised_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_well, 4, tmp_path / "c")
    file = next((tmp_path / "c" / "data").glob("*-00002.safetensors"))
    flip(file, -1)
    for outcome in rank_pool.outcomes(load_again, 4, tmp_path / "c"):
        assert isinstance(outcome.error, IntegrityError)
        assert outcome.error.rank == 2
        assert file.name in str(outcome.error)


def save_while_rank_1_is_late(directory: Path) -> None:
    asking = [directory / f"asking.{rank}" for rank in (0, 2)]

    def build(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> Any:
        if dist.get_rank() == 1:
            wait_for(lambda: all(file.exists() for file in asking))
        return shard()

    def ask(*arguments: Any, **options: Any) -> Any:
        (directory / f"asking.{dist.get_rank()}").touch()
        return find_missing(*arguments, **options | {"timeout_s": 60.0})  # until rank 1 has come

    find_missing = missing_ranks._missing_and_late
    factory = ShardedTensorFactory("f", torch.zeros(1), build, lambda x: x)
    with patch.object(missing_ranks, "_missing_and_late", ask):
        megackpt.save({"f": factory}, directory / "c", options=SaveOptions(timeout_s=3))


def test_a_rank_that_comes_after_the_deadline_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    outcomes = rank_pool.outcomes(save_while_rank_1_is_late, 3, tmp_path)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankFailedError), outcome.trace
        if outcome.rank != 1:
            assert "rank(s) 1, which answered only later, within 3 s" in str(outcome.error)
            assert outcome.error.rank == 1


def train_until_a_signal(
    root: Path, send: dict[int, tuple[int, int]]
) -> tuple[list[int], int | None, list[float]]:
    """Train until a signal ends it; send is by step: to which rank, which signal. Return what was saved."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(100)
    state = {"w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ranks))}
    saved = []

    with Checkpointer(
        root,
        schedule=SaveSchedule(steps=1000, signals=(signal.SIGTERM, signal.SIGUSR1), agree_s=0.05),
        timeout_s=30.0,
    ) as checkpointer:
        for step in range(1, 600):
            weight += 1
            time.sleep(0.002)
            if step in send and send[step][0] == rank:
                os.kill(os.getpid(), send[step][1])
            if checkpointer.maybe_save(step, lambda: state):
                saved.append(step)
            if checkpointer.exit_requested:
                break
        weight.zero_()
        checkpointer.load(state)
        return saved, checkpointer.exit_code, weight.unique().tolist()


def test_a_signal_to_one_rank_saves_on_all_and_sigterm_ends_all(rank_pool: RankPool, tmp_path: Path) -> None:
    send = {20: (1, signal.SIGUSR1), 200: (2, signal.SIGTERM)}
    outcomes = rank_pool.run(train_until_a_signal, 3, tmp_path, send)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (first, last), code, values = outcomes[0]
    print(f"signals at steps 20 and 200, saved at {first} and {last}")
    assert 20 <= first < 200 <= last < 400
    assert code == 143
    assert values == [float(last)]
    assert Checkpointer(tmp_path).steps() == (first, last)
