"""Leftovers of unfinished and earlier saves of any format are removed; files of others are not."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import Checkpointer, CheckpointError, ShardedTensor, StorageError, load, save
from megackpt.comm import SingleProcess
from megackpt.engine.checkpoint.removal import files_of_saves, is_leftover
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
from tests.support.dcp_alone import ALONE
from tests.support.effort import sampled
from tests.support.states import filled

Strategy = tuple[str, int]
STRATEGIES: list[Strategy] = [("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3)]
PAIRS = list(itertools.permutations(STRATEGIES, 2))
REJECTED = (("torch_dist", 1), ("zarr", 1))  # its common.pt would be replaced before the commit


def state(value: float, names: str = "ab") -> dict[str, object]:
    tensors = [filled(value, 4, 3, key=f"t.{n}") for n in names]
    return {"model": tensors, "value": value}


def value_of(directory: Path) -> float:
    tensors = [ShardedTensor.from_rank_offsets(f"t.{n}", torch.zeros(4, 3)) for n in "ab"]
    loaded = load({"model": tensors}, directory)
    values = {loaded["value"], *(float(v) for t in tensors for v in t.data.unique())}
    assert len(values) == 1, f"a mixture: {values}"
    return float(values.pop())


def files_of(directory: Path) -> list[str]:
    """All files, without what tells attempts from each other."""
    seen = (str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    return sorted(re.sub(r"[0-9a-f]{16,32}", "X", name) for name in seen)


def dying(directory: Path, at: int) -> FaultyStore:
    """Return a store of a process that dies at an operation: it does nothing any more, not even clean up."""
    return FaultyStore(LocalStore(directory), fail_at=lambda op: op.index >= at)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_first_save_that_dies_anywhere_is_incomplete_and_removed_once_a_newer_step_is_committed(
    tmp_path: Path, strategy: Strategy
) -> None:
    checkpointer = Checkpointer(tmp_path, group=SingleProcess())
    for at in range(300):
        try:
            save(state(1.0), dying(checkpointer.directory(at), at), sharded_strategy=strategy)
            break
        except StorageError:
            pass
        if checkpointer.directory(at).exists():
            assert checkpointer.scan().incomplete == (at,), files_of(checkpointer.directory(at))
            checkpointer.directory(at).rename(tmp_path / f"kept-{at}")
    assert at > 5
    for kept in sorted(tmp_path.glob("kept-*")):
        kept.rename(checkpointer.directory(int(kept.name.split("-")[1])))
    checkpointer.save(500, state(2.0))
    assert checkpointer.scan().incomplete == ()
    assert checkpointer.scan().committed == (at, 500)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_removal_that_dies_anywhere_leaves_an_incomplete_step(tmp_path: Path, strategy: Strategy) -> None:
    for at in range(100):
        directory = tmp_path / str(at)
        save(state(1.0), directory, sharded_strategy=strategy)
        (directory / MANIFEST).unlink()
        store = LocalStore(directory)
        files = files_of_saves(store)
        assert set(files) == set(store.names())
        store.delete(files[:at])
        assert is_leftover(LocalStore(directory))
        if at >= len(files):
            break


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_save_over_another_format_leaves_only_its_own_files(
    tmp_path: Path, pair: tuple[Strategy, Strategy]
) -> None:
    first, second = pair
    save(state(2.0), tmp_path / "fresh", sharded_strategy=second)
    save(state(1.0, "abz"), tmp_path / "c", sharded_strategy=first)
    (tmp_path / "c/notes.txt").write_text("mine")
    (tmp_path / "c/common-notes.txt").write_text("mine")
    if pair == REJECTED:
        before = files_of(tmp_path / "c")
        with pytest.raises(StorageError, match="checkpoint of another format"):
            save(state(2.0), tmp_path / "c", sharded_strategy=second)
        assert files_of(tmp_path / "c") == before
        assert value_of(tmp_path / "c") == 1.0
        return
    save(state(2.0), tmp_path / "c", sharded_strategy=second)
    assert value_of(tmp_path / "c") == 2.0
    assert files_of(tmp_path / "c") == sorted(
        [*files_of(tmp_path / "fresh"), "notes.txt", "common-notes.txt"]
    )


@sampled(3)
@pytest.mark.parametrize("pair", [p for p in PAIRS if p != REJECTED], ids=str)
def test_a_save_over_another_format_that_dies_anywhere_leaves_the_old_or_the_new_and_is_cleaned_up(
    tmp_path: Path, pair: tuple[Strategy, Strategy]
) -> None:
    first, second = pair
    save(state(3.0), tmp_path / "fresh")
    outcomes = []
    for at in range(0, 200, 2):
        directory = tmp_path / str(at)
        save(state(1.0, "abz"), directory, sharded_strategy=first)
        try:
            save(state(2.0), dying(directory, at), sharded_strategy=second)
            break
        except CheckpointError:
            pass
        if (directory / MANIFEST).exists():
            outcomes.append(value_of(directory))
        else:
            assert second == ("zarr", 1)
            assert is_leftover(LocalStore(directory))
        save(state(3.0), directory)
        assert value_of(directory) == 3.0
        assert files_of(directory) == files_of(tmp_path / "fresh")
    assert outcomes[0] == 1.0
    assert set(outcomes) <= {1.0, 2.0}


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_checkpoint_that_dcp_wrote_is_no_leftover_and_never_removed(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, **ALONE)
    before = set(files_of(tmp_path))
    assert not is_leftover(LocalStore(tmp_path))
    assert files_of_saves(LocalStore(tmp_path)) == []
    for strategy in (("zarr", 3), ("megackpt", 1), ("zarr", 3)):
        save(state(1.0), tmp_path, sharded_strategy=strategy)
        assert before <= set(files_of(tmp_path))


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)
def test_what_dcp_wrote_over_ours_is_no_leftover(tmp_path: Path) -> None:
    save(state(1.0), tmp_path, sharded_strategy=("torch_dist", 1))
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "common.pt").write_bytes(b"theirs")
    assert not is_leftover(LocalStore(tmp_path))
    assert "common.pt" not in files_of_saves(LocalStore(tmp_path))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, **ALONE)
    assert not {".metadata", "__0_0.distcp"} & set(files_of_saves(LocalStore(tmp_path)))
