"""Three real ranks, each a node, whose writer processes save into tiers while training goes on."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    MemoryTier,
    ShardedObject,
    ShardedTensor,
    Tiers,
    WriterFailedError,
)
from megackpt.checkpointer import LastLoad
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all, with_all
from tests.support.writers import TIER_ORDER, TierOrder, in_a_tier, saver_of, wait_for

RANKS = 3
DEADLINE_S = 600.0  # none waits for it
LOGGED = {
    "dies": "was killed by SIGKILL while saving step 6 in the memory tier",
    "sleeps": "No answer from the writer process of rank(s) 1 within 3 s",
}


class AsyncCheckpointer(Checkpointer):
    _writer_hook = f"{in_a_tier.__module__}:{in_a_tier.__name__}"


def state(step: int) -> dict[str, Any]:
    """A replicated weight, and a share of each rank that goes to another node in three parts."""
    rank = dist.get_rank()
    weight = torch.arange(1000.0).mul_(step)
    share = torch.arange(RANKS * 9 << 18, dtype=torch.int32).add_(step).chunk(RANKS)[rank].clone()
    return {
        "weight": ShardedTensor.from_rank_offsets("w", weight, replica_id=rank),
        "share": ShardedTensor.from_rank_offsets("s", share, (0, rank, RANKS)),
        "rng": ShardedObject("rng", [rank, step] * step, (RANKS,), (rank,)),
        "step": step,
    }


def checkpointer(base: Path, timeout_s: float = DEADLINE_S, **options: Any) -> Checkpointer:
    tier = MemoryTier(f"{base}/node-{{node}}")
    return AsyncCheckpointer(
        base / "root",
        async_save=AsyncOptions(nice=0),
        tiers=Tiers([tier], root_every=100, node=dist.get_rank()),
        timeout_s=timeout_s,
        **options,
    )


def load(base: Path) -> LastLoad:
    """Load the newest step that is whole, and compare every bit."""
    tiers = Tiers([MemoryTier(f"{base}/node-{{node}}")], root_every=100, node=dist.get_rank())
    restarted = Checkpointer(base / "root", tiers=tiers)
    asked = state(0)
    loaded = restarted.load(asked)
    assert restarted.last_load is not None
    expected = state(restarted.last_load.step)
    for key in ("weight", "share"):
        assert torch.equal(loaded[key], expected[key].data), key
    assert (loaded["rng"], loaded["step"]) == (expected["rng"].data, restarted.last_load.step)
    return restarted.last_load


class LogRecorder(logging.Handler):
    """What a rank has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def steps_on(base: Path) -> list[str]:
    """The steps that this rank's node has committed."""
    return sorted(p.parent.name for p in (base / f"node-{dist.get_rank()}").glob("*/metadata.json"))


def order(base: Path, **what: str) -> None:
    """Let something happen in the saves from now on; nothing if it is not said what."""
    dist.barrier()
    if dist.get_rank() == 0:
        (base / TIER_ORDER).unlink(missing_ok=True)
        if what:
            TierOrder(**what).give(base)
    dist.barrier()


def train(base: Path, received: LogRecorder) -> None:
    with checkpointer(base) as run:
        saved = state(1)
        run.warm_up(saved)
        store = saver_of(run).store
        run.save(1, saved, to_root=True)
        run.save(2, state(2))
        run.wait()
        dist.barrier()
        assert store is not None
        keys = store.key_count() if dist.get_rank() == 0 else 0  # rank 0's writer ends last, and clears them
        assert run.steps() == (1,)
        assert steps_on(base) == ["iter_0000001", "iter_0000002"]

        order(base, node="node-1", kind="create", how="held")
        saved = state(3)
        assert run.save(3, saved)
        saved["share"].data.zero_()  # what is saved is what it was
        wait_for((base / "begun").exists)
        assert run.poll()
        assert steps_on(base) == ["iter_0000001", "iter_0000002"]
        dist.barrier()
        (base / "go").touch()
        run.wait()
        dist.barrier()
        assert steps_on(base) == ["iter_0000002", "iter_0000003"]
        assert received.texts == []

        order(base, node="node-2", kind="writer.write", name="00001.safetensors", how="full")
        assert run.save(4, state(4), to_root=True)
        assert run.find_latest() == 4  # it waits; the root is well
        assert run.failed_saves == 0
        assert run.steps() == (1, 4)
        assert steps_on(base) == ["iter_0000002", "iter_0000003"]
        assert not list((base / f"node-{dist.get_rank()}").glob("iter_0000004/*/*"))
        message = [text for text in received.texts if "Step 4 is not in the memory tier" in text]
        assert len(message) == (dist.get_rank() == 0)
        assert all("No space left" in text for text in message)

        order(base)
        run.save(5, state(5))
        run.wait()
        assert saver_of(run).store is store  # a tier that is full is no reason to connect anew
        dist.barrier()
        assert dist.get_rank() or store.key_count() == keys


def lose_a_writer(base: Path, how: str, timeout_s: float) -> tuple[str, float]:
    """A writer dies or falls asleep as it takes the copy for another node; return the error, and the time."""
    run = checkpointer(base, timeout_s)
    run.warm_up(state(6))
    order(base, node="node-1", kind="writer.write", name="00000.safetensors", how=how)
    began = time.monotonic()
    run.save(6, state(6), to_root=True)
    with pytest.raises(WriterFailedError) as raised:
        run.wait()
    elapsed = time.monotonic() - began
    order(base)
    assert raised.value.rank == 1
    assert steps_on(base)[-1] == "iter_0000005"
    assert run.steps() == (1, 4)
    run.save(7, state(7))
    run.close()
    dist.barrier()
    assert steps_on(base)[-1] == "iter_0000007"
    shutil.rmtree(base / f"node-{dist.get_rank()}" / "iter_0000007")
    return str(raised.value), elapsed


def train_in_trouble(base: Path, troubles: list[str]) -> list[tuple[str, float]]:
    received = LogRecorder()
    logging.getLogger("megackpt.checkpointer").addHandler(received)
    try:
        train(base, received)
    finally:
        logging.getLogger("megackpt.checkpointer").removeHandler(received)
    return [lose_a_writer(base, how, DEADLINE_S if how == "dies" else 3.0) for how in troubles]


def test_tiers_are_written_asynchronously_and_survive_a_lost_node_a_full_one_and_a_lost_writer(
    rank_pool: RankPool, memory_path: Path
) -> None:
    troubles = list(LOGGED) if tries_all() else ["dies"]  # to start writers takes seconds
    everyone = rank_pool.run(train_in_trouble, RANKS, memory_path, troubles)
    for of_rank in everyone:
        for how, (text, elapsed), (first, _) in zip(troubles, of_rank, everyone[0], strict=True):
            print(how, elapsed, text)
            assert text == first
            assert LOGGED[how] in text
            assert elapsed < DEADLINE_S / 2
    shutil.rmtree(memory_path / "root")
    for lost in range(RANKS) if tries_all() else [random.Random(0).randrange(RANKS)]:
        shutil.copytree(memory_path, restarted := memory_path / "restarted")
        shutil.rmtree(restarted / f"node-{lost}")
        results = rank_pool.run(load, RANKS, restarted)
        assert {(used.step, used.damaged) for used in results} == {(5, ())}
        shutil.rmtree(restarted)


def lose_a_node(base: Path) -> tuple[str, float]:
    """The training of a node dies while its writer waits in a save, and others wait for that."""
    run = checkpointer(base)
    run.save(1, state(1))
    run.wait()
    order(base, node="node-1", kind="writer.write", name="00000.safetensors", how="held")
    run.save(2, state(2))
    wait_for((base / "begun").exists)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WriterFailedError) as raised:
        run.wait()
    elapsed = time.monotonic() - began
    assert raised.value.rank == 1
    saver_of(run).abandon()
    return str(raised.value), elapsed


@with_all("connections that break are in test_writers.py")
def test_a_node_that_is_lost_is_named_by_all_others_long_before_the_deadline(
    rank_pool: RankPool, memory_path: Path
) -> None:
    outcomes = rank_pool.outcomes(lose_a_node, RANKS, memory_path)
    assert isinstance(outcomes[1].error, EOFError)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        text, elapsed = outcome.value
        assert "writer process of rank 1 broke" in text
        assert elapsed < DEADLINE_S / 2
    shutil.rmtree(memory_path / "node-1")
    assert {used.step for used in rank_pool.run(load, RANKS, memory_path)} == {1}
