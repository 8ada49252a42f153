"""The steps of a run: which count, which stay, and that no other file is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from megackpt import Checkpointer, DeclarationError, NotACheckpointError
from megackpt.storage import LocalStore
from tests.support.states import filled


def state(value: float) -> dict[str, object]:
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
        assert checkpointer.steps() == (20, 100, 12_345_678)
        assert value_of(checkpointer) == 12_345_678
        assert value_of(checkpointer, 20) == 20
        with pytest.raises(NotACheckpointError, match="iter_0000021"):
            value_of(checkpointer, 21)


def test_keep_last_removes_older_steps_after_a_newer_is_committed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in range(1, 6):
        checkpointer.save(step, state(step))
    assert checkpointer.steps() == (4, 5)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000005"]


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


def test_a_name_with_extra_zeros_is_not_a_step(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(100, state(100))
    (tmp_path / "iter_00000100").mkdir()
    checkpointer.save(200, state(200))
    assert checkpointer.steps() == (100, 200)
    assert value_of(checkpointer, 100) == 100


def test_an_older_step_than_the_newest_is_saved_with_a_warning_and_a_negative_one_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(300, state(300))
    with caplog.at_level(logging.WARNING):
        checkpointer.save(150, state(150))
    assert "Step 150 is saved although step 300 exists" in caplog.text
    with pytest.raises(DeclarationError, match="step is -5"):
        checkpointer.save(-5, state(0))
    with pytest.raises(DeclarationError, match="keep_last is 0"):
        Checkpointer(tmp_path, keep_last=0)


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


def test_the_removal_of_a_commit_is_durable_before_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, tuple[str, ...]]] = []
    delete, sync = LocalStore.delete, LocalStore.sync

    def delete_noted(store: LocalStore, names: Iterable[str]) -> None:
        listed = tuple(names)
        if store.location.endswith("iter_0000001"):
            done.append(("delete", listed))
        delete(store, listed)

    def sync_noted(store: LocalStore) -> None:
        if store.location.endswith("iter_0000001"):
            done.append(("sync", ()))
        sync(store)

    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, {"x": 1})
        monkeypatch.setattr(LocalStore, "delete", delete_noted)
        monkeypatch.setattr(LocalStore, "sync", sync_noted)
        checkpointer.save(2, {"x": 2})
    commit = done.index(("delete", ("metadata.json",)))
    others = next(i for i, (kind, names) in enumerate(done) if kind == "delete" and i != commit and names)
    assert commit < done.index(("sync", ()), commit) < others
