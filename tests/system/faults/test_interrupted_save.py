"""Ranks or writers are killed at random moments: nothing committed is lost, no incomplete step is chosen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, RankFailedError, ShardedTensor
from megackpt.testing.ranks import RankPool
from tests.support.effort import few, with_all
from tests.support.writers import saver_of
from tests.system.faults import interrupted_job
from tests.system.faults.interrupted_job import (
    LIMIT_S,
    RANKS,
    Notes,
    Tally,
    await_end,
    named_shared_memory,
    save_one_step_after_the_other,
)

KILLS_SYNC = few(3, of=100)
KILLS_ASYNC = few(1, of=100)
KILLS_OF_WRITERS = few(1, of=50)
KILLS_UNDER_TORCHRUN = 200
WRITERS_END_S = 120.0
"""Until the writers of killed ranks have ended; milliseconds, where the machine is not busy."""


@pytest.mark.parametrize(
    "async_save",
    [False, pytest.param(True, marks=with_all("random kills of asynchronous saves take a minute"))],
)
def test_a_kill_at_any_moment_leaves_the_last_committed_step_loadable(
    tmp_path: Path, async_save: bool
) -> None:
    pool = RankPool()
    root = tmp_path / "ckpt"
    generator = random.Random(20261121)
    kills = KILLS_ASYNC if async_save else KILLS_SYNC
    tally = Tally()
    for kill in range(kills):
        notes = Notes(tmp_path, kill)
        notes.put("go")
        pids = pool.pids(RANKS)
        arguments = (save_one_step_after_the_other, RANKS, root, notes, async_save)
        job = threading.Thread(target=pool.outcomes, args=arguments)
        job.start()
        time.sleep(generator.uniform(0, notes.duration()))
        check_no_names(notes)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.join(60)
        assert not job.is_alive()
        assert len(notes.writers()) == (RANKS if async_save else 0)
        await_end(notes.writers(), WRITERS_END_S)
        tally.look(root, notes)
    pool.close()
    print(tally)
    assert tally.interrupted >= kills // 4


@with_all("ranks of a pool are killed; 200 kills under torchrun take many minutes")
def test_kills_under_torchrun_lose_nothing(tmp_path: Path) -> None:
    print(kill_under_torchrun(tmp_path, KILLS_UNDER_TORCHRUN, seed=20261122))


def kill_under_torchrun(directory: Path, kills: int, *, seed: int) -> str:
    """Kill all ranks of a job, or one of them, whereupon torchrun starts it again; say what was seen."""
    root, generator = directory / "ckpt", random.Random(seed)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    restarts = [f"--max-restarts={kills}", "--monitor-interval=0.1"]
    script = [str(Path(interrupted_job.__file__)), str(root), str(directory)]
    with open(directory / "log", "wb") as log:
        agent = subprocess.Popen([*start, *restarts, *script], stdout=log, stderr=log)
    tally, of_one_rank, slowest = Tally(), 0, 0.0
    try:
        Notes(directory, 0).put("go")
        for kill in range(kills):
            notes = Notes(directory, kill)
            time.sleep(generator.uniform(0, notes.duration()))
            check_no_names(notes)
            ranks = notes.processes()
            killed = generator.choice([ranks, *([pid] for pid in ranks)])
            of_one_rank += len(killed) == 1
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            await_end(ranks, 300)  # torchrun ends those that live
            slowest = max(slowest, await_end(notes.writers(), WRITERS_END_S))
            tally.look(root, notes)
            Notes(directory, kill + 1).put("go")
        last = Notes(directory, kills)
        last.duration()
    finally:
        agent.terminate()
        agent.wait(60)
    await_end([*last.processes(), *last.writers()], 300)
    assert tally.interrupted >= kills // 4
    return f"{tally}; {of_one_rank} of one rank alone; writers ended within {slowest:.3f} s of their ranks"


def check_no_names(notes: Notes) -> None:
    """Check that nothing would be left in /dev/shm by processes that are about to be killed."""
    for pid in (*notes.processes(), *notes.writers()):
        assert named_shared_memory(pid) == []


def go_on_without_a_writer(root: Path, kills: int, seed: int) -> tuple[int, int]:
    """Save while writer processes are killed; return how often a save failed, and the newest step."""
    generator = random.Random(seed)  # the same on all ranks
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.empty(1 << 21)

    def part(value: float) -> dict[str, ShardedTensor]:
        return {"w": ShardedTensor.from_rank_offsets("w", data.fill_(value), (0, rank, size))}

    with Checkpointer(root, keep_last=2, async_save=True, timeout_s=LIMIT_S) as checkpointer:
        saver = saver_of(checkpointer)
        checkpointer.save(0, part(0))
        checkpointer.wait()
        good, failures = 0, 0
        for _ in range(kills):
            step = good + 1
            took = _seconds_of(lambda step=step: (checkpointer.save(step, part(step)), checkpointer.wait()))
            good, step = step, step + 1
            victim, delay = generator.randrange(size), generator.uniform(0, 1.2) * took
            dist.barrier()
            killer = threading.Timer(delay, os.kill, (saver.writer_pid, signal.SIGKILL))
            if rank == victim:
                killer.start()
            asks_by_saving = generator.random() < 0.5
            error: RankFailedError | None = None
            try:
                checkpointer.save(step, part(step))
                if asks_by_saving:
                    data.zero_()
                    checkpointer.save(step + 1, part(step + 1))
                checkpointer.wait()
            except RankFailedError as raised:
                error = raised
                assert f"writer process of rank {victim}" in str(error)
                assert "killed by SIGKILL" in str(error)
            if rank == victim:
                killer.join()
            messages: list[str | None] = [None] * size
            dist.all_gather_object(messages, error and str(error))
            failures += any(messages)
            newest = checkpointer.find_latest()
            assert newest is not None
            assert newest >= good
            if not all(messages):  # somebody was not told, so nothing may be lost
                assert newest == step + asks_by_saving
            loaded = checkpointer.load({"w": part(0)["w"]})
            assert torch.equal(loaded["w"], torch.full_like(data, newest))
            good = newest
    dist.barrier()
    return failures, good


def _seconds_of(act: object) -> float:
    """Do it, and return how long it took on rank 0."""
    began = time.monotonic()
    act()  # type: ignore[operator]
    took = torch.tensor(time.monotonic() - began)
    dist.broadcast(took, src=0)
    return float(took)


def test_training_goes_on_saving_when_writer_processes_are_killed(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    limit_s = 60.0 * (1 + KILLS_OF_WRITERS)
    arguments = (tmp_path, KILLS_OF_WRITERS, 0)
    everyone = rank_pool.run(go_on_without_a_writer, RANKS, *arguments, timeout_s=limit_s)
    assert everyone[0] == everyone[1]
    failures, newest = everyone[0]
    print(f"{KILLS_OF_WRITERS} kills of a writer, {failures} of which let a save fail")
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() == newest
    for step in checkpointer.steps():
        whole = ShardedTensor.from_rank_offsets("w", torch.zeros(RANKS << 21))
        loaded = checkpointer.load({"w": whole}, step)
        assert torch.equal(loaded["w"], torch.full_like(loaded["w"], step))
