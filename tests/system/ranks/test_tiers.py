"""Asynchronous saves into tiers: of writers of three nodes, and of one process alone."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    LoadOptions,
    LocalTier,
    MemoryTier,
    ShardedObject,
    ShardedTensor,
    StorageError,
    Tiers,
)
from megackpt.comm import SingleProcess
from megackpt.engine.background import saver
from megackpt.engine.background.staging_memory import StreamRange
from megackpt.errors import WriterFailedError
from megackpt.run.checkpointer import LastLoad
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all
from tests.support.writers import (
    TIER_ORDER,
    TierOrder,
    in_a_tier,
    saver_of,
    single_process_checkpointer,
    stop_process,
    wait_for,
)

WRITERS = 3
DEADLINE_S = 600.0  # none waits for it
LOGGED = {
    "dies": "was killed by SIGKILL while saving step 6 in the memory tier",
    "sleeps": "No answer from the writer process of rank(s) 1 within 3 s",
}


class AsyncCheckpointer(Checkpointer):
    _writer_hook = f"{in_a_tier.__module__}:{in_a_tier.__name__}"


def shares(step: int) -> dict[str, Any]:
    """A replicated weight, and a share of each rank that goes to another node in three parts."""
    rank = dist.get_rank()
    weight = torch.arange(1000.0).mul_(step)
    share = torch.arange(WRITERS * 9 << 18, dtype=torch.int32).add_(step).chunk(WRITERS)[rank].clone()
    return {
        "weight": ShardedTensor.from_rank_offsets("w", weight, replica_id=rank),
        "share": ShardedTensor.from_rank_offsets("s", share, (0, rank, WRITERS)),
        "rng": ShardedObject("rng", [rank, step] * step, (WRITERS,), (rank,)),
        "step": step,
    }


def tiers_of(base: Path) -> Tiers:
    return Tiers([MemoryTier(f"{base}/node-{{node}}")], root_every=100, node=dist.get_rank())


def async_checkpointer(base: Path, timeout_s: float = DEADLINE_S) -> Checkpointer:
    options = AsyncOptions(nice=0)
    return AsyncCheckpointer(base / "root", async_save=options, tiers=tiers_of(base), timeout_s=timeout_s)


def load_shares(base: Path) -> LastLoad:
    """Load the newest step that is whole, and compare every bit."""
    restarted = Checkpointer(base / "root", tiers=tiers_of(base))
    asked = shares(0)
    loaded = restarted.load(asked)
    assert restarted.last_load is not None
    expected = shares(restarted.last_load.step)
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
    with async_checkpointer(base) as run:
        saved = shares(1)
        run.warm_up(saved)
        store = saver_of(run).store
        run.save(1, saved, to_root=True)
        run.save(2, shares(2))
        run.wait()
        dist.barrier()
        assert store is not None
        keys = store.key_count() if dist.get_rank() == 0 else 0  # rank 0's writer ends last, and clears them
        assert run.steps() == (1,)
        assert steps_on(base) == ["iter_0000001", "iter_0000002"]

        order(base, node="node-1", kind="create", how="held")
        saved = shares(3)
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
        assert run.save(4, shares(4), to_root=True)
        assert run.find_latest() == 4  # it waits; the root is well
        assert run.failed_saves == 0
        assert run.steps() == (1, 4)
        assert steps_on(base) == ["iter_0000002", "iter_0000003"]
        assert not list((base / f"node-{dist.get_rank()}").glob("iter_0000004/*/*"))
        message = [text for text in received.texts if "Step 4 is not in the memory tier" in text]
        assert len(message) == (dist.get_rank() == 0)
        assert all("No space left" in text for text in message)

        order(base)
        run.save(5, shares(5))
        run.wait()
        assert saver_of(run).store is store  # a tier that is full is no reason to connect anew
        dist.barrier()
        assert dist.get_rank() or store.key_count() == keys


def lose_a_writer(base: Path, how: str, timeout_s: float) -> tuple[str, float]:
    """A writer dies or falls asleep as it takes the copy for another node; return the error, and the time."""
    run = async_checkpointer(base, timeout_s)
    run.warm_up(shares(6))
    order(base, node="node-1", kind="writer.write", name="00000.safetensors", how=how)
    began = time.monotonic()
    run.save(6, shares(6), to_root=True)
    with pytest.raises(WriterFailedError) as raised:
        run.wait()
    elapsed = time.monotonic() - began
    order(base)
    assert raised.value.rank == 1
    assert steps_on(base)[-1] == "iter_0000005"
    assert run.steps() == (1, 4)
    run.save(7, shares(7))
    run.close()
    dist.barrier()
    assert steps_on(base)[-1] == "iter_0000007"
    shutil.rmtree(base / f"node-{dist.get_rank()}" / "iter_0000007")
    return str(raised.value), elapsed


def train_in_trouble(base: Path, troubles: list[str]) -> list[tuple[str, float]]:
    received = LogRecorder()
    logging.getLogger("megackpt.run.checkpointer").addHandler(received)
    try:
        train(base, received)
    finally:
        logging.getLogger("megackpt.run.checkpointer").removeHandler(received)
    return [lose_a_writer(base, how, DEADLINE_S if how == "dies" else 3.0) for how in troubles]


def test_tiers_are_written_asynchronously_and_survive_a_lost_node_a_full_one_and_a_lost_writer(
    rank_pool: RankPool, memory_path: Path
) -> None:
    troubles = list(LOGGED) if tries_all() else ["dies"]  # to start writers takes seconds
    everyone = rank_pool.run(train_in_trouble, WRITERS, memory_path, troubles)
    for of_rank in everyone:
        for how, (text, elapsed), (first, _) in zip(troubles, of_rank, everyone[0], strict=True):
            print(how, elapsed, text)
            assert text == first
            assert LOGGED[how] in text
            assert elapsed < DEADLINE_S / 2
    shutil.rmtree(memory_path / "root")
    for lost in range(WRITERS) if tries_all() else [random.Random(0).randrange(WRITERS)]:
        shutil.copytree(memory_path, restarted := memory_path / "restarted")
        shutil.rmtree(restarted / f"node-{lost}")
        results = rank_pool.run(load_shares, WRITERS, restarted)
        assert {(used.step, used.damaged) for used in results} == {(5, ())}
        shutil.rmtree(restarted)


ROWS = 3000


def state_alone(step: int) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(ROWS * 3.0).add_(step)),
        "o": ShardedObject("o", "x" * step, (1,), (0,)),
        "step": step,
    }


def check(root: Path, steps: Sequence[int]) -> None:
    """Load steps from a directory that has all of their files."""
    there = Checkpointer(root)
    assert there.steps() == tuple(steps)
    for step in steps:
        loaded, expected = there.load(state_alone(0), step), state_alone(step)
        assert torch.equal(loaded["w"], expected["w"].data)
        assert (loaded["o"], loaded["step"]) == ("x" * step, step)


@pytest.fixture
def copied_ranges(monkeypatch: pytest.MonkeyPatch) -> list[StreamRange]:
    copied: list[StreamRange] = []
    copy_rows = saver.copy_rows

    def note(memory: Any, target: StreamRange, *rest: Any) -> None:
        copied.append(target)
        copy_rows(memory, target, *rest)

    monkeypatch.setattr(saver, "copy_rows", note)
    return copied


@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_for_several_destinations_is_copied_once(
    tmp_path: Path, copied_ranges: list[StreamRange], in_background: bool
) -> None:
    tiers = [LocalTier(tmp_path / name) for name in "ab"]
    options = AsyncOptions(stage_in_background=in_background, when_busy="queue")
    with single_process_checkpointer(
        tmp_path / "root", tiers=Tiers(tiers, root_every=2), async_save=options
    ) as run:
        for step in range(1, 5):
            saved_state = state_alone(step)
            run.save(step, saved_state)
            run.wait_staged()
            saved_state["w"].data.zero_()
    assert len(copied_ranges) == 4
    check(tmp_path / "root", [2, 4])
    for name in "ab":
        check(tmp_path / name, [3, 4])


def test_staged_bytes_for_several_destinations_stay_until_the_last_has_them(tmp_path: Path) -> None:
    TierOrder(node="b", kind="create", how="held").give(tmp_path)
    tiers = [LocalTier(tmp_path / name) for name in "ab"]
    options = AsyncOptions(when_busy="queue", stage_in_background=True)
    with AsyncCheckpointer(
        tmp_path / "root", tiers=Tiers(tiers, root_every=9), async_save=options, group=SingleProcess()
    ) as run:
        run.save(1, state_alone(1))
        wait_for((tmp_path / "begun").exists)
        writer = saver_of(run)._session.writer
        wait_for(lambda: len(writer._jobs) == 1)
        assert writer._consumed == 0
        run.save(2, state_alone(2))  # is not copied before the memory is free
        (tmp_path / "go").touch()
        run.wait()
        assert writer._consumed > 0
    check(tmp_path / "b", [1, 2])


@pytest.mark.parametrize(
    ("strategy", "staging_bytes"), [(None, 8192), (("torch_dist", 1), None)], ids=["waves", "formats"]
)
def test_a_state_that_does_not_fit_or_has_two_formats_is_copied_for_each_destination(
    tmp_path: Path, copied_ranges: list[StreamRange], strategy: Any, staging_bytes: int | None
) -> None:
    options = AsyncOptions(staging_bytes=staging_bytes)
    with single_process_checkpointer(
        tmp_path / "root", tiers=[LocalTier(tmp_path / "a")], async_save=options
    ) as run:
        for step in (1, 2):
            run.save(step, state_alone(step), sharded_strategy=strategy)
    assert len(copied_ranges) == 4
    check(tmp_path / "a", [1, 2])
    check(tmp_path / "root", [1, 2])


def test_after_a_skipped_step_the_next_one_goes_to_all_its_destinations(tmp_path: Path) -> None:
    tiers = Tiers([LocalTier(tmp_path / "a", every=2), LocalTier(tmp_path / "b", every=3)], root_every=4)
    with single_process_checkpointer(
        tmp_path / "root", tiers=tiers, async_save=AsyncOptions(when_busy="skip")
    ) as run:
        run.warm_up(state_alone(2))
        stop_process(saver_of(run).writer_pid)
        assert [run.save(step, state_alone(step)) for step in (2, 4, 5)] == [True, False, False]
        os.kill(saver_of(run).writer_pid, signal.SIGCONT)
        run.wait()
        assert run.save(7, state_alone(7))
        run.wait()
        assert not run.save(11, state_alone(11))
    check(tmp_path / "a", [2, 7])
    check(tmp_path / "root", [7])
    check(tmp_path / "b", [])


def test_an_error_of_the_root_does_not_keep_a_step_out_of_the_tiers(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a directory")
    with single_process_checkpointer(tmp_path / "root", tiers=[LocalTier(tmp_path / "a")]) as run:
        with pytest.raises(StorageError, match="root: cannot create"):
            run.save(1, state_alone(1), metrics={"loss": 1.0})
        run.save(2, state_alone(2))
        with pytest.raises(StorageError, match="root"):
            run.wait()
    check(tmp_path / "a", [1, 2])


def test_a_tier_for_which_there_is_no_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with single_process_checkpointer(
        tmp_path / "root", tiers=Tiers([LocalTier(tmp_path / "a")], root_every=2)
    ) as run:
        with monkeypatch.context() as patched:
            patched.setattr("megackpt.engine.background.staging_memory._available_bytes", lambda: 0)
            assert not run.save(1, state_alone(1))
            assert f"Step 1 is not in the local disk tier {tmp_path / 'a'}" in caplog.text
            with pytest.raises(StorageError, match="cannot be allocated"):
                run.save(2, state_alone(2))
        run.save(4, state_alone(4))
    check(tmp_path / "a", [4])
    check(tmp_path / "root", [4])


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_error_of_an_earlier_save_is_not_taken_for_that_of_a_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: Any
) -> None:
    (tmp_path / "root").write_text("not a directory")
    tiers = Tiers([LocalTier(tmp_path / "a")], root_every=2)
    with single_process_checkpointer(tmp_path / "root", tiers=tiers, on_error=on_error) as run:
        run.save(2, state_alone(2))
        if on_error == "raise":
            with pytest.raises(StorageError, match="root"):
                run.save(3, state_alone(3))
        else:
            assert run.save(3, state_alone(3))
        assert run.failed_saves == 1
        run.save(5, state_alone(5))
    assert "is not in the local disk tier" not in caplog.text
    check(tmp_path / "a", [2, 5] if on_error == "raise" else [3, 5])


def test_one_process_saves_asynchronously_into_its_tier_and_to_the_root(memory_path: Path) -> None:
    tier = MemoryTier(memory_path / "memory", every=2)
    saved = ShardedTensor.from_rank_offsets("old.w", torch.arange(5.0))
    tiers = Tiers([tier], root_every=3)
    with Checkpointer(memory_path / "root", tiers=tiers, async_save=True, keep_last=1) as run:
        for step in range(2, 7):
            run.save(step, {"w": saved, "step": step})
        assert run.find_latest() == 6
        assert run.steps() == (6,)
    assert sorted(path.name for path in (memory_path / "memory").iterdir()) == [
        "iter_0000004",
        "iter_0000006",
    ]
    options = LoadOptions(rename={"old.*": "new.*"})
    asked = {"w": ShardedTensor.from_rank_offsets("new.w", torch.zeros(5))}
    again = Checkpointer(memory_path / "root", tiers=[tier], load_options=options)
    assert again.load(asked, step=4)["w"].tolist() == [0, 1, 2, 3, 4]
