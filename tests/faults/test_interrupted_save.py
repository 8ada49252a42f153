"""All ranks are killed at random moments of a save: nothing committed is lost, nothing torn is chosen."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, ShardedTensor
from megackpt.comm import SingleProcess
from megackpt.testing.ranks import RankPool
from tests.effort import is_thorough

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

RANKS = 2
KILLS = 200 if is_thorough() else 6
TENSORS = 8
NUMEL = 1 << 20  # 8 tensors of 4 MiB on each of 2 ranks


def save_one_step_after_the_other(root: Path, marker: Path) -> None:
    """Go on from the newest step, for ever; the value of every element is the number of the step.

    From the second save on rank 0 writes how long the first took, in seconds, right before it begins.
    """
    checkpointer = Checkpointer(root, keep_last=2)
    rank, size = dist.get_rank(), dist.get_world_size()
    step = checkpointer.latest() or 0
    tensors = [torch.empty(NUMEL) for _ in range(TENSORS)]
    while True:
        step += 1
        for tensor in tensors:
            tensor.fill_(step)
        state = {
            str(i): ShardedTensor.from_rank_offsets(f"t{i}", t, (0, rank, size))
            for i, t in enumerate(tensors)
        }
        began = time.monotonic()
        checkpointer.save(step, {"model": state, "step": step})
        if rank == 0 and not marker.exists():
            marker.with_suffix(".new").write_text(str(time.monotonic() - began))
            marker.with_suffix(".new").replace(marker)
        dist.barrier()


def load_alone(root: Path) -> tuple[int, torch.Tensor]:
    checkpointer = Checkpointer(root, group=SingleProcess())
    tensors = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", torch.zeros(RANKS * NUMEL)) for i in range(TENSORS)
    }
    loaded = checkpointer.load({"model": tensors})
    return loaded["step"], torch.stack(list(loaded["model"].values()))


def committed_and_torn(root: Path) -> tuple[list[int], list[int]]:
    found = Checkpointer(root, group=SingleProcess()).scan()
    return list(found.committed), list(found.torn)


def test_a_kill_at_any_moment_leaves_the_last_committed_step_loadable(tmp_path: Path) -> None:
    pool = RankPool()
    generator = random.Random(20261121)
    torn_seen = 0
    newest_before = 0
    for kill in range(KILLS):
        marker = tmp_path / f"saving-{kill}"
        pids = pool.pids(RANKS)
        arguments = (save_one_step_after_the_other, RANKS, tmp_path / "ckpt", marker)
        job = threading.Thread(target=pool.outcomes, args=arguments)
        job.start()
        deadline = time.monotonic() + 60
        while not marker.exists():
            assert time.monotonic() < deadline, "the restarted run did not go on"
            time.sleep(0.001)
        time.sleep(generator.uniform(0, float(marker.read_text())))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.join(60)
        assert not job.is_alive()

        committed, torn = committed_and_torn(tmp_path / "ckpt")
        torn_seen += any(t > committed[-1] for t in torn)
        step, values = load_alone(tmp_path / "ckpt")
        assert step == committed[-1] > newest_before
        assert torch.equal(values, torch.full_like(values, step))
        # Torn is the step that was being saved, or an old one that was being removed.
        assert all(t == step + 1 or t < committed[0] for t in torn)
        newest_before = step
    pool.close()
    print(f"{KILLS} kills, {torn_seen} left a torn step, newest committed step {newest_before}")
    # A kill in the last part of a save, after the commit, leaves nothing torn; the others do.
    assert torn_seen >= KILLS // 2
