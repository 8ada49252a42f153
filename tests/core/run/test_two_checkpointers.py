"""Two Checkpointers on one root, which is not supported: no committed step is lost without an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megackpt import Checkpointer, StorageError
from tests.support.states import filled
from tests.support.writers import SlowCommit


def state(value: float) -> dict[str, Any]:
    return {"w": filled(value, 3)}


def loaded(root: Path, step: int) -> float:
    return float(Checkpointer(root).load(state(0.0), step)["w"][0])


def test_a_save_under_way_fails_when_another_commits_a_newer_step_and_no_committed_step_is_removed(
    tmp_path: Path,
) -> None:
    first, other, slow = Checkpointer(tmp_path), Checkpointer(tmp_path), SlowCommit()
    first.save(1, state(1.0))
    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(first.save, 2, state(2.0), sharded_strategy=slow)
        assert slow.is_written.wait(60)
        other.save(3, state(3.0))
        slow.goes_on.set()
        with pytest.raises(StorageError, match=r"is gone. Another job saves to the same directory"):
            saving.result()
    assert Checkpointer(tmp_path).steps() == (1, 3)
    first.save(2, state(2.0))
    assert [loaded(tmp_path, step) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("begins", ["first", "last"])
def test_of_a_step_that_both_save_at_once_one_is_committed_whole(tmp_path: Path, begins: str) -> None:
    # The one that is slow to commit has begun first, or last.
    slow, quick = SlowCommit(), SlowCommit()
    saving = {}
    with ThreadPoolExecutor(2) as threads:
        pairs = [(slow, 1.0), (quick, 2.0)]
        for strategy, value in pairs if begins == "first" else pairs[::-1]:
            save = partial(Checkpointer(tmp_path).save, 5, state(value), sharded_strategy=strategy)
            saving[strategy] = threads.submit(save)
            assert strategy.is_written.wait(60)
        quick.goes_on.set()
        assert saving[quick].exception(60) is None
        slow.goes_on.set()
        error = saving[slow].exception(60)
    assert isinstance(error, StorageError if begins == "first" else type(None))
    assert loaded(tmp_path, 5) == (2.0 if begins == "first" else 1.0)
