"""Zarr saves that fail or die at any one operation: never a mixture, and nothing of others is removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megackpt import NotACheckpointError, ShardedObject, StorageError, load, load_plain_tensors, save
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore, Operation
from tests.support.effort import sampled
from tests.support.states import filled

Strategy = tuple[str, int]
STRATEGIES: list[Strategy] = [("zarr", 1), ("zarr", 3)]


def state(value: float, *, names: str = "ab") -> dict[str, object]:
    tensors = [filled(value, 10, 3, key=f"t.{n}") for n in names]
    return {"model": tensors, "value": value, "o": ShardedObject("o", value, (1,), (0,))}


def value_of(directory: Path) -> float:
    """Load everything there is and return the one value that all of it has."""
    values = {float(v) for t in load_plain_tensors(directory).values() for v in t.unique()}
    common = load({"o": ShardedObject("o", None, (1,), (0,))}, directory)
    values |= {common["value"], common["o"]}
    assert len(values) == 1, f"a mixture: {values}"
    return float(values.pop())


def files_of(directory: Path) -> set[str]:
    """All files, without what tells attempts from each other."""
    seen = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    return {re.sub(r"[0-9a-f]{16}", "ATTEMPT", name) for name in seen}


@sampled(2)
@pytest.mark.parametrize("dies", [False, True], ids=["fails", "dies"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_an_overwriting_save_that_stops_anywhere_leaves_old_or_new_or_none(
    tmp_path: Path, strategy: Strategy, dies: bool
) -> None:
    save(state(3.0), tmp_path / "clean", sharded_strategy=strategy)
    expected = files_of(tmp_path / "clean")
    outcomes = []
    for at in range(0, 300, 1 if dies else 3):
        directory = tmp_path / str(at)
        save(state(1.0, names="az"), directory, sharded_strategy=strategy)
        (directory / "notes.txt").write_text("mine")
        # A process that dies does nothing any more, not even clean up.
        chosen = (lambda op, at=at: op.index >= at) if dies else at
        try:
            save(state(2.0), FaultyStore(LocalStore(directory), fail_at=chosen), sharded_strategy=strategy)
            done = True
        except StorageError:
            done = False
        try:
            value = value_of(directory)
        except NotACheckpointError:
            value = 0.0
        outcomes.append(value)
        assert value == 2.0 or not done
        save(state(3.0), directory, sharded_strategy=strategy)
        assert value_of(directory) == 3.0
        assert files_of(directory) == {*expected, "notes.txt"}
        if done and not dies and at > 3 and outcomes[-3:] == [2.0] * 3:
            break
        if done and dies:
            break
    else:
        raise AssertionError("more operations than this test tries")
    assert outcomes[0] == 1.0
    if strategy == ("zarr", 3):
        assert set(outcomes) == {1.0, 2.0}
    else:  # between taking the old commit away and making the new one, there is none
        assert set(outcomes) == {0.0, 1.0, 2.0}
        if dies:  # old, then none, then new: no death brings an earlier state back
            assert outcomes == sorted(outcomes, key=[1.0, 0.0, 2.0].index)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_first_save_that_dies_anywhere_is_cleaned_up_by_the_next(
    tmp_path: Path, strategy: Strategy
) -> None:
    save(state(3.0), tmp_path / "clean", sharded_strategy=strategy)
    for at in range(300):
        directory = tmp_path / str(at)
        store = FaultyStore(LocalStore(directory), fail_at=lambda op, at=at: op.index >= at)
        try:
            save(state(1.0, names="az"), store, sharded_strategy=strategy)
            break
        except StorageError:
            pass
        if directory.exists():
            with pytest.raises(NotACheckpointError):
                value_of(directory)
        save(state(3.0), directory, sharded_strategy=strategy)
        assert value_of(directory) == 3.0
        assert files_of(directory) == files_of(tmp_path / "clean")
    assert at > 10


def test_files_of_others_are_never_removed_nor_overwritten(tmp_path: Path) -> None:
    save(state(1.0), tmp_path, sharded_strategy=("zarr", 1))
    user_files = ["t.a/README", "t.a/0.0.bak", "other/0.0", "t.n/0.0", "t.n/notes"]
    for name in user_files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    save(state(2.0, names="b"), tmp_path, sharded_strategy=("zarr", 1))
    assert all((tmp_path / name).read_text() == "mine" for name in user_files)
    assert not (tmp_path / "t.a/.zarray").exists()
    with pytest.raises(StorageError, match=r"no part of a checkpoint(.|\n)*t\.n/0\.0"):
        save(state(3.0, names="bn"), tmp_path, sharded_strategy=("zarr", 1))
    assert value_of(tmp_path) == 2.0
    assert all((tmp_path / name).read_text() == "mine" for name in user_files)


def test_arrays_of_an_unfinished_save_by_others_raise_an_error_before_anything_is_written(
    tmp_path: Path,
) -> None:
    save(state(1.0), tmp_path, sharded_strategy=("zarr", 1))
    (tmp_path / "metadata.json").unlink()
    for marker in tmp_path.glob(".megackpt-*"):
        marker.unlink()
    before = files_of(tmp_path)
    with pytest.raises(StorageError, match=r"zarr arrays without a checkpoint(.|\n)*t\.a/\.zarray"):
        save(state(2.0), tmp_path, sharded_strategy=("zarr", 1))
    assert files_of(tmp_path) == before


def test_checkpoints_of_other_formats_are_replaced_only_where_nothing_can_mix(tmp_path: Path) -> None:
    save(state(1.0), tmp_path / "native")
    store = FaultyStore(LocalStore(tmp_path / "native"), fail_at=lambda op: op.name == "metadata.json")
    with pytest.raises(StorageError):
        save(state(2.0), store, sharded_strategy=("zarr", 1))
    assert value_of(tmp_path / "native") == 1.0
    save(state(3.0), tmp_path / "native", sharded_strategy=("zarr", 1))
    assert value_of(tmp_path / "native") == 3.0
    save(state(1.0), tmp_path / "other")
    (tmp_path / "other/common.pt").write_text("of the other format")
    with pytest.raises(StorageError, match=r"checkpoint of another format"):
        save(state(2.0), tmp_path / "other", sharded_strategy=("zarr", 1))
    assert value_of(tmp_path / "other") == 1.0
    # A marker of a save before names common.pt, which is that of torch_dist now.
    save(state(1.0), tmp_path / "dist", sharded_strategy=("zarr", 1))
    save(state(2.0), tmp_path / "dist", sharded_strategy=("torch_dist", 1))
    with pytest.raises(StorageError, match=r"checkpoint of another format"):
        save(state(3.0), tmp_path / "dist", sharded_strategy=("zarr", 1))
    assert value_of(tmp_path / "dist") == 2.0
    save(state(1.0), tmp_path / "back", sharded_strategy=("zarr", 1))
    save(state(2.0), tmp_path / "back")
    save(state(3.0), tmp_path / "back", sharded_strategy=("zarr", 1))
    assert value_of(tmp_path / "back") == 3.0


def test_a_checkpoint_that_megatron_core_wrote_is_replaced_whole(tmp_path: Path) -> None:
    save(state(1.0, names="az"), tmp_path, sharded_strategy=("zarr", 1))
    for marker in tmp_path.glob(".megackpt-*"):  # it has none of these
        marker.unlink()
    save(state(2.0), tmp_path, sharded_strategy=("zarr", 1))
    assert value_of(tmp_path) == 2.0
    assert not [name for name in files_of(tmp_path) if name.startswith("t.z")]


def test_a_save_that_fails_while_files_are_put_in_place_leaves_the_checkpoint_of_before(
    tmp_path: Path,
) -> None:
    for at in range(100):
        directory = tmp_path / str(at)
        save(state(1.0, names="az"), directory, sharded_strategy=("zarr", 1))
        before = files_of(directory)
        seen = [0]

        def is_chosen(operation: Operation, at: int = at, seen: list[int] = seen) -> bool:
            seen[0] += operation.kind == "move"
            return operation.kind == "move" and seen[0] == at + 1

        try:
            save(
                state(2.0),
                FaultyStore(LocalStore(directory), fail_at=is_chosen),
                sharded_strategy=("zarr", 1),
            )
            break
        except StorageError:
            assert value_of(directory) == 1.0
            assert files_of(directory) == before
    assert at > 10
    assert value_of(directory) == 2.0
