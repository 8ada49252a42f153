"""Numbered steps under one root: saves, loads, policies, and two checkpointers of one root."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    Checkpointer,
    DeclarationError,
    IntegrityError,
    KeepBest,
    NotACheckpointError,
    Retention,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    StorageError,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.verification.verify import ShareReport, verify_share
from megackpt.run.checkpointer import saving
from megackpt.run.checkpointer.retention import Cleanup
from megackpt.run.checkpointer.root import write_pin
from megackpt.storage import LocalStore, MemoryStore, Store
from megackpt.testing.world import SimulatedWorld
from tests.support.states import filled
from tests.support.writers import Damaging, SlowCommit


def state(value: float) -> dict[str, Any]:
    return {"w": filled(value, 3)}


def value_of(checkpointer: Checkpointer, step: int | None = None) -> float:
    return float(checkpointer.load(state(0.0), step=step)["w"][0])


def test_the_newest_committed_step_is_loaded_and_any_other_on_demand(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(NotACheckpointError, match="has no committed step"):
            checkpointer.load(state(0.0))
        for step in (100, 20, 12_345_678):
            checkpointer.save(step, state(step))
        (tmp_path / "run" / "iter_00000100").mkdir()  # no step: its name has too many zeros
        assert checkpointer.steps() == (20, 100, 12_345_678)
        assert value_of(checkpointer) == 12_345_678
        assert [value_of(checkpointer, step) for step in (20, 100)] == [20, 100]
        with pytest.raises(NotACheckpointError, match="iter_0000021"):
            value_of(checkpointer, 21)


def test_an_incomplete_step_is_a_warning_and_removed_once_a_newer_step_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 3):
        checkpointer.save(step, state(step))
    (tmp_path / "iter_0000003" / "metadata.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert value_of(checkpointer) == 1
    assert "iter_0000003 is not committed" in caplog.text
    checkpointer.save(2, state(2))
    assert checkpointer.scan().incomplete == (3,)  # it might be another job's save, under way
    checkpointer.save(4, state(4))
    assert checkpointer.scan().incomplete == ()
    assert checkpointer.steps() == (1, 2, 4)


def test_directories_of_others_are_never_removed(tmp_path: Path) -> None:
    legacy = tmp_path / "iter_0000001" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(b"another program's checkpoint")
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(5, state(5))
    checkpointer.save(6, state(6))
    assert (legacy / "model_optim_rng.pt").exists()
    assert checkpointer.scan().incomplete == ()


def test_a_linked_step_loads_and_only_the_link_is_removed(tmp_path: Path) -> None:
    original = Checkpointer(tmp_path / "original")
    original.save(100, state(100))
    branch = Checkpointer(tmp_path / "branch", keep_last=1)
    (tmp_path / "branch").mkdir()
    (tmp_path / "branch" / "iter_0000100").symlink_to(tmp_path / "original" / "iter_0000100")
    assert value_of(branch) == 100
    branch.save(200, state(200))
    assert branch.steps() == (200,)
    assert value_of(original) == 100


def test_an_older_step_than_the_newest_is_saved_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(300, state(300))
    with caplog.at_level(logging.WARNING):
        checkpointer.save(150, state(150))
    assert "Step 150 goes back from step 300 and leaves these steps of" in caplog.text
    assert "megackpt rollback" in caplog.text


def test_a_relative_root_means_the_same_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run")
    checkpointer.save(1, state(1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.save(2, state(2))
    assert checkpointer.steps() == (1, 2)


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
    message = r"iter_0000001 is not committed.*Name the directory that a Checkpointer saves to"
    with pytest.raises(NotACheckpointError, match=message):
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
    checkpointer.save(301, {"a": 301})
    checkpointer.save(300, {"a": 300})  # a new branch
    assert (tmp_path / TRACKER).read_text() == "300"
    for lie in ("900", "150", "release", "\0"):
        (tmp_path / TRACKER).write_text(lie)
        assert Checkpointer(tmp_path).latest() == 300
        assert Checkpointer(tmp_path).load({}) == {"a": 300}
    (tmp_path / f".{TRACKER}.0123456789abcdef.tmp").write_text("half")
    (tmp_path / ".note.0123456789abcdef.tmp").write_text("the user's own")
    checkpointer.save(302, {"a": 302})
    assert (tmp_path / TRACKER).read_text() == "302"
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
    assert checkpointer.save_options.timeout_s == checkpointer._load_options.timeout_s == 7.0


def test_damaged_metrics_are_none(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": 1}, metrics={"loss": 1.0})
    (file,) = (tmp_path / ".megackpt" / "metrics").iterdir()
    assert json.loads(file.read_text()) == {"loss": 1.0}
    for content in ("", "[1]", '{"loss": [1]}', "{" * 10_000, '{"a": {"b"'):
        file.write_text(content)
        assert checkpointer.metrics(1) == {}


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
        with pytest.raises(StorageError, match=r"is gone. Do all ranks see one directory\?.*another job"):
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


GATE, UP = torch.zeros(4, 2), torch.ones(4, 2)


def part_of(rank: int) -> torch.Tensor:
    return torch.cat([GATE.chunk(2)[rank], UP.chunk(2)[rank]])


def test_all_kinds_are_listed_with_sizes_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flat = torch.zeros(3)
    state = {
        "cut": ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 3)),
        "copy": ShardedTensor.from_rank_offsets("norm", torch.zeros(4), replica_id=(0, 0, 1)),
        "flat": ShardedTensor.from_rank_offsets_flat("m", flat, (2, 3), flattened_range=slice(1, 4)),
        "seen": ShardedObject("seen", 1, (1,), (0,)),
        "args": {"lr": 0.1, "mean": torch.zeros(5)},
    }
    report = megackpt.check(state)
    assert [(a.key, a.kind, a.nbytes, a.writes) for a in report.arrays] == [
        ("w", "cut", 32, True),
        ("norm", "whole", 16, False),
        ("m", "cut", 12, True),
    ]
    assert report.objects == ("seen/shard_0_1",)
    assert (report.common, report.common_nbytes) == (("args.lr", "args.mean"), 20)
    text = str(report)
    assert "[4:8, 0:2]" in text
    assert "[0:2, 0:3] flat 1:4" in text
    assert (
        "arrays: 2 cut (44 bytes), 1 whole (16 bytes); objects: 1; common state: 2 leaves (20 bytes)" in text
    )
    assert not report.suspects
    assert not list(tmp_path.iterdir())


def test_a_fused_weight_declared_as_one_cut_is_named_with_a_declaration_that_works(tmp_path: Path) -> None:
    wrong = ShardedTensor.from_rank_offsets("mlp.gate_up.weight", part_of(1), (0, 1, 2))
    (suspicion,) = megackpt.check({"w": wrong}).suspects
    assert "tp=1 reads [0:4) of rank 0, [4:8) of rank 1" in suspicion
    proposed = suspicion[suspicion.index("ShardedLayout.split(") : -1]

    def save_rank(group: Group) -> None:
        call = proposed.replace("(0, 1, 2)", f"(0, {group.rank}, 2)")
        names = {"ShardedLayout": ShardedLayout, "data": part_of(group.rank)}
        save({"w": eval(call, names)}, tmp_path / "c", group=group)

    SimulatedWorld(2).run(save_rank)
    data = torch.full((8, 2), 9.0)
    whole = ShardedLayout.split("mlp.gate_up.weight", data, 0, {"gate": 4, "up": 4})
    report = megackpt.check({"w": whole})
    assert not report.suspects
    assert len(report.fused) == 2
    load({"w": whole}, tmp_path / "c")
    assert torch.equal(data, torch.cat([GATE, UP]))
