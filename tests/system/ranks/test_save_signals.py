"""Real signals to real ranks: one of them receives it, all save the same step and exit with the same code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt import Checkpointer, SaveSchedule, ShardedTensor
from megackpt.testing.ranks import RankPool


def train(root: Path, send: dict[int, tuple[int, int]]) -> tuple[list[int], int | None, list[float]]:
    """Train until a signal ends it; send is by step: to which rank, which signal. Return what was saved."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(100)
    saved = []

    def state() -> dict[str, object]:
        return {"w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ranks))}

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
            if checkpointer.maybe_save(step, state):
                saved.append(step)
            if checkpointer.exit_requested:
                break
        loaded = checkpointer.load(
            {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(100), (0, rank, ranks))}
        )
        return saved, checkpointer.exit_code, loaded["w"].unique().tolist()


def test_a_signal_to_one_rank_saves_on_all_and_sigterm_ends_all(rank_pool: RankPool, tmp_path: Path) -> None:
    send = {20: (1, signal.SIGUSR1), 200: (2, signal.SIGTERM)}
    outcomes = rank_pool.run(train, 3, tmp_path, send)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (first, last), code, values = outcomes[0]
    print(f"signals at steps 20 and 200, saved at {first} and {last}")
    assert 20 <= first < 200 <= last < 400
    assert code == 143
    assert values == [float(last)]
    assert Checkpointer(tmp_path).steps() == (first, last)
