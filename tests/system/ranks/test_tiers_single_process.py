"""One process saves asynchronously into tiers and a root: copies, skipped steps, and single failures."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.support.writers import (
    TierOrder,
    in_a_tier,
    saver_of,
    single_process_checkpointer,
    stop_process,
    wait_for,
)

ROWS = 3000


def state(step: int) -> dict[str, Any]:
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
        loaded, expected = there.load(state(0), step), state(step)
        assert torch.equal(loaded["w"], expected["w"].data)
        assert (loaded["o"], loaded["step"]) == ("x" * step, step)


@pytest.fixture
def copied_ranges(monkeypatch: pytest.MonkeyPatch) -> list[StreamRange]:
    """The ranges of the stream that are copied."""
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
            saved_state = state(step)
            run.save(step, saved_state)
            run.wait_staged()
            saved_state["w"].data.zero_()
    assert len(copied_ranges) == 4
    check(tmp_path / "root", [2, 4])
    for name in "ab":
        check(tmp_path / name, [3, 4])


class WaitingCheckpointer(Checkpointer):
    _writer_hook = f"{in_a_tier.__module__}:{in_a_tier.__name__}"


def test_staged_bytes_for_several_destinations_stay_until_the_last_has_them(tmp_path: Path) -> None:
    TierOrder(node="b", kind="create", how="held").give(tmp_path)
    tiers = [LocalTier(tmp_path / name) for name in "ab"]
    options = AsyncOptions(when_busy="queue", stage_in_background=True)
    with WaitingCheckpointer(
        tmp_path / "root", tiers=Tiers(tiers, root_every=9), async_save=options, group=SingleProcess()
    ) as run:
        run.save(1, state(1))
        wait_for((tmp_path / "begun").exists)
        writer = saver_of(run)._session.writer
        wait_for(lambda: len(writer._jobs) == 1)
        assert writer._consumed == 0
        run.save(2, state(2))  # is not copied before the memory is free
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
            run.save(step, state(step), sharded_strategy=strategy)
    assert len(copied_ranges) == 4
    check(tmp_path / "a", [1, 2])
    check(tmp_path / "root", [1, 2])


def test_after_a_skipped_step_the_next_one_goes_to_all_its_destinations(tmp_path: Path) -> None:
    tiers = Tiers([LocalTier(tmp_path / "a", every=2), LocalTier(tmp_path / "b", every=3)], root_every=4)
    with single_process_checkpointer(
        tmp_path / "root", tiers=tiers, async_save=AsyncOptions(when_busy="skip")
    ) as run:
        run.warm_up(state(2))
        stop_process(saver_of(run).writer_pid)
        assert [run.save(step, state(step)) for step in (2, 4, 5)] == [True, False, False]
        os.kill(saver_of(run).writer_pid, signal.SIGCONT)
        run.wait()
        assert run.save(7, state(7))
        run.wait()
        assert not run.save(11, state(11))
    check(tmp_path / "a", [2, 7])
    check(tmp_path / "root", [7])
    check(tmp_path / "b", [])


def test_an_error_of_the_root_does_not_keep_a_step_out_of_the_tiers(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a directory")
    with single_process_checkpointer(tmp_path / "root", tiers=[LocalTier(tmp_path / "a")]) as run:
        with pytest.raises(StorageError, match="root: cannot create"):
            run.save(1, state(1), metrics={"loss": 1.0})
        run.save(2, state(2))
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
            assert not run.save(1, state(1))
            assert f"Step 1 is not in the local disk tier {tmp_path / 'a'}" in caplog.text
            with pytest.raises(StorageError, match="cannot be allocated"):
                run.save(2, state(2))
        run.save(4, state(4))
    check(tmp_path / "a", [4])
    check(tmp_path / "root", [4])


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_error_of_an_earlier_save_is_not_taken_for_that_of_a_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: Any
) -> None:
    (tmp_path / "root").write_text("not a directory")
    tiers = Tiers([LocalTier(tmp_path / "a")], root_every=2)
    with single_process_checkpointer(tmp_path / "root", tiers=tiers, on_error=on_error) as run:
        run.save(2, state(2))
        if on_error == "raise":
            with pytest.raises(StorageError, match="root"):
                run.save(3, state(3))
        else:
            assert run.save(3, state(3))
        assert run.failed_saves == 1
        run.save(5, state(5))
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
