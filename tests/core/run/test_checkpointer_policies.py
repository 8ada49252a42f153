"""Actions after a commit: retention, pins, metrics, verification, the tracker file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    Checkpointer,
    DeclarationError,
    IntegrityError,
    KeepBest,
    NotACheckpointError,
    Retention,
    ShardedTensor,
)
from megackpt.checkpointer import saving
from megackpt.checkpointer.retention import Cleanup
from megackpt.checkpointer.root_files import write_pin
from megackpt.comm import Group
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.verification.verify import ShareReport, verify_share
from megackpt.storage import LocalStore, MemoryStore, Store
from megackpt.testing.world import SimulatedWorld
from tests.support.writers import Damaging

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | Store:
    return tmp_path / "run" if request.param == "directory" else MemoryStore()


def top(root: Path | Store) -> set[str]:
    """The first parts of the names of all files."""
    store = LocalStore(root) if isinstance(root, Path) else root
    return {name.partition("/")[0] for name in store.names()}


def test_last_every_best_and_pinned_steps_stay_also_after_a_restart(root: Path | Store) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 1.5, 60: 4.0, 70: 5.0, 80: 6.0}
    for step, loss in losses.items():  # each by a new process, as it were
        retention = Retention(keep_last=1, keep_every=40, keep_best=KeepBest(metric="loss", n=2))
        with Checkpointer(root, retention=retention) as checkpointer:
            checkpointer.save(step, {"step": step}, metrics={"loss": torch.tensor(loss)})
            if step == 20:
                checkpointer.pin(10)
    assert checkpointer.steps() == (10, 20, 40, 50, 80)
    assert checkpointer.metrics(50) == {"loss": 1.5}
    assert checkpointer.metrics(40)["loss"] != checkpointer.metrics(40)["loss"]
    assert checkpointer.metrics(60) == {}  # gone with its step
    assert checkpointer.load({}, "latest") == {"step": 80}
    checkpointer.unpin(10)
    checkpointer.save(90, {"step": 90}, metrics={"loss": 0.5})
    assert checkpointer.steps() == (20, 40, 80, 90)
    names = {"iter_0000020", "iter_0000040", "iter_0000080", "iter_0000090", ".megackpt", TRACKER}
    assert top(root) == names


def test_what_was_saved_just_now_stays_although_a_newer_step_exists(root: Path | Store) -> None:
    checkpointer = Checkpointer(root, keep_last=1)
    checkpointer.save(300, {"a": 300})
    checkpointer.save(150, {"a": 150})
    assert checkpointer.steps() == (150, 300)
    checkpointer.save(160, {"a": 160})
    assert checkpointer.steps() == (160, 300)


def test_metrics_are_those_of_the_last_save_of_a_step(root: Path | Store) -> None:
    checkpointer = Checkpointer(root)
    checkpointer.save(1, {"a": 1}, metrics={"loss": 1.0, "rate": 2})
    assert checkpointer.metrics(1) == {"loss": 1.0, "rate": 2.0}
    checkpointer.save(1, {"a": 2})
    assert checkpointer.metrics(1) == {}
    with pytest.raises(DeclarationError, match=r"metrics\['loss'\] is 'low'; give a single number"):
        checkpointer.save(2, {"a": 2}, metrics={"loss": "low"})  # type: ignore[dict-item]
    assert checkpointer.scan().incomplete == ()
    assert checkpointer.load({}) == {"a": 2}


def test_a_pin_keeps_a_step_whatever_happens_and_needs_a_committed_one(root: Path | Store) -> None:
    checkpointer = Checkpointer(root, keep_last=1)
    with pytest.raises(
        NotACheckpointError, match=r"iter_0000001 is not committed.*Pin one of the committed steps: none"
    ):
        checkpointer.pin(1)
    assert checkpointer.pins() == ()
    checkpointer.save(1, {"a": 1})
    checkpointer.pin(1)
    checkpointer.pin(1)
    checkpointer.save(2, {"a": 2})
    checkpointer.save(3, {"a": 3})
    assert checkpointer.steps() == (1, 3)
    assert Checkpointer(root).pins() == (1,)
    checkpointer.unpin(1)
    checkpointer.unpin(1)
    assert checkpointer.pins() == ()


def test_a_pin_that_is_set_after_the_decision_still_counts(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, {"a": step})

    class PinnedMeanwhile(LocalSteps):
        def remove(self, name: str) -> None:
            write_pin(self.root, 2)  # by someone else, while step 1 is removed
            super().remove(name)

    Cleanup(PinnedMeanwhile(tmp_path), Retention(keep_last=1)).after_commit(3)
    assert checkpointer.steps() == (2, 3)


def test_the_tracker_names_the_newest_commit_and_is_never_trusted(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(300, {"a": 300})
    assert (tmp_path / TRACKER).read_text() == "300"
    checkpointer.save(150, {"a": 150})
    assert (tmp_path / TRACKER).read_text() == "300"
    for lie in ("900", "150", "release", "\0"):
        (tmp_path / TRACKER).write_text(lie)
        assert Checkpointer(tmp_path).latest() == 300
        assert Checkpointer(tmp_path).load({}) == {"a": 300}
    (tmp_path / f".{TRACKER}.0123456789abcdef.tmp").write_text("half")
    (tmp_path / ".note.0123456789abcdef.tmp").write_text("the user's own")
    checkpointer.save(301, {"a": 301})
    assert (tmp_path / TRACKER).read_text() == "301"
    assert sorted(p.name for p in tmp_path.glob(".*")) == [".note.0123456789abcdef.tmp"]


def test_a_tracker_that_cannot_be_written_does_not_fail_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRACKER).mkdir()
    with caplog.at_level(logging.WARNING):
        Checkpointer(tmp_path).save(1, {"a": 1})
    assert "after the commit of step 1" in caplog.text
    assert Checkpointer(tmp_path).load({}) == {"a": 1}


def tensor(rank: int, value: float) -> dict[str, object]:
    part = torch.full((50_000,), value + rank)
    return {"w": ShardedTensor.from_rank_offsets("w", part, (0, rank, 2)), "value": value}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_step_that_is_damaged_right_after_the_commit_is_removed_and_older_ones_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    def save(group: Group, step: int) -> int:
        checkpointer = Checkpointer(
            tmp_path, keep_last=1, verify_after_save=True, on_error=on_error, group=group
        )
        checkpointer.save(step, tensor(group.rank, float(step)), metrics={"loss": 1.0})
        return checkpointer.failed_saves

    assert SimulatedWorld(2).run(lambda group: save(group, 1)) == [0, 0]
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(LocalSteps, "open", lambda self, name: Damaging(self._root / name))
        outcomes = SimulatedWorld(2).outcomes(lambda group: save(group, 2))
    if on_error == "warn":
        assert outcomes == [1, 1]
        texts = [caplog.text]
    else:
        assert all(isinstance(outcome, IntegrityError) and outcome.key == "w" for outcome in outcomes)
        texts = [str(outcome) for outcome in outcomes]
    for text in texts:
        assert "iter_0000002 is damaged right after it was saved" in text
        assert "-00001.safetensors" in text
        assert "'w'" in text
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.scan().committed == (1,)
    assert checkpointer.scan().incomplete == ()
    assert checkpointer.metrics(2) == {}
    assert (tmp_path / TRACKER).read_text() == "1"
    assert SimulatedWorld(2).run(lambda group: save(group, 3)) == [0, 0]
    assert checkpointer.steps() == (3,)


def test_each_rank_verifies_its_share_and_no_byte_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[tuple[int, int]] = []

    def look(store: Store, options: Any, progress: Any, share: tuple[int, int]) -> ShareReport:
        shares.append(share)
        return verify_share(store, options, progress, share)

    monkeypatch.setattr(saving, "verify_share", look)

    def save(group: Group) -> bool:
        checkpointer = Checkpointer(tmp_path, verify_after_save=True, group=group)
        return checkpointer.save(1, tensor(group.rank, 1.0))

    assert SimulatedWorld(2).run(save) == [True, True]
    assert sorted(shares) == [(0, 2), (1, 2)]


def test_steps_to_load_are_numbers_or_the_latest_and_timeout_s_is_that_of_saves_and_loads(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path, timeout_s=7.0)
    for step in (1, 2):
        checkpointer.save(step, {"a": step})
    assert [checkpointer.load({}, step)["a"] for step in (1, 2, None, "latest")] == [1, 2, 2, 2]
    with pytest.raises(DeclarationError, match="step is 'newest'"):
        checkpointer.load({}, "newest")  # type: ignore[arg-type]
    assert checkpointer.save_options.timeout_s == checkpointer._settings.load_options.timeout_s == 7.0


def test_damaged_metrics_are_none(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": 1}, metrics={"loss": 1.0})
    (file,) = (tmp_path / ".megackpt" / "metrics").iterdir()
    assert json.loads(file.read_text()) == {"loss": 1.0}
    for content in ("", "[1]", '{"loss": [1]}', "{" * 10_000, '{"a": {"b"'):
        file.write_text(content)
        assert checkpointer.metrics(1) == {}
