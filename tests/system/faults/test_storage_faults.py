"""Saves that fail or die at any one operation on their store: old or new, never a mixture, and no leftovers.

Leftovers of unfinished and earlier saves of any format are removed; files of others are not.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import (
    Checkpointer,
    CheckpointError,
    RankFailedError,
    ShardedObject,
    StorageError,
    load,
    load_plain_tensors,
    save,
)
from megackpt.comm import Group, SingleProcess
from megackpt.engine.checkpoint.removal import files_of_saves, is_leftover
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import READS, FaultyStore, access_denied, io_error, no_space
from megackpt.testing.world import SimulatedWorld
from tests.support.dcp_alone import ALONE
from tests.support.effort import sampled
from tests.support.states import filled
from tests.support.zarr_v1 import save_zarr_v1

Strategy = tuple[str, int]
STRATEGIES: list[Strategy] = [("megackpt", 1), ("torch_dist", 1), ("zarr", 3)]
PAIRS = list(itertools.permutations(STRATEGIES, 2))


def state(value: float, names: str = "ab") -> dict[str, object]:
    tensors = [filled(value, 10, 3, key=f"t.{n}") for n in names]
    return {
        "model": tensors,
        "value": value,
        "blob": torch.full((3,), value),
        "o": ShardedObject("o", value, (1,), (0,)),
    }


def value_of(directory: Path) -> float:
    """Load everything there is and return the one value that all of it has."""
    values = {float(v) for t in load_plain_tensors(directory).values() for v in t.unique()}
    common = load({"o": ShardedObject("o", None, (1,), (0,))}, directory)
    values |= {common["value"], common["o"], *common["blob"].tolist()}
    assert len(values) == 1, f"a mixture: {values}"
    return float(values.pop())


def names_of(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def files_of(directory: Path) -> list[str]:
    """All files, without what tells attempts from each other."""
    return sorted(re.sub(r"[0-9a-f]{16,32}", "X", name) for name in names_of(directory))


def dying(directory: Path, at: int) -> FaultyStore:
    """Return a store of a process that dies at an operation: it does nothing any more, not even clean up."""
    return FaultyStore(LocalStore(directory), fail_at=lambda op: op.index >= at)


def error_of(store: FaultyStore, strategy: Strategy) -> StorageError | None:
    """Save other values and return the error, if there was one."""
    try:
        save(state(2.0), store, sharded_strategy=strategy)
    except StorageError as error:
        return error
    return None


def after_each_death(
    tmp_path: Path, strategy: Strategy, *, before: Callable[[Path], object], step: int = 1
) -> Iterator[Path]:
    """Yield directories in which saves of 2 died, each at a later operation, until one does not die."""
    for at in range(0, 300, step):
        directory = tmp_path / str(at)
        before(directory)
        try:
            save(state(2.0), dying(directory, at), sharded_strategy=strategy)
            return
        except CheckpointError:
            yield directory
    raise AssertionError("more operations than this test tries")


NATIVE, ZARR = STRATEGIES[0], STRATEGIES[2]


@pytest.mark.parametrize(
    ("strategy", "error"),
    [(NATIVE, no_space), (NATIVE, io_error), (NATIVE, access_denied), (ZARR, io_error)],
)
def test_a_save_that_fails_at_any_operation_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, strategy: Strategy, error: Callable[[], OSError]
) -> None:
    outcomes = []
    for fail_at in range(300):
        directory = tmp_path / f"{fail_at}"
        save(state(1.0), directory, sharded_strategy=strategy)
        before = names_of(directory)
        store = FaultyStore(LocalStore(directory), fail_at=fail_at, error=error)
        reason = error_of(store, strategy)
        outcomes.append(2.0 if reason is None else 1.0)
        if reason is not None:
            assert str(directory) in str(reason)
            assert names_of(directory) == before
        assert value_of(directory) == outcomes[-1]
        # The next save works, and cleans up what could not be removed.
        save(state(3.0), directory, sharded_strategy=strategy)
        assert value_of(directory) == 3.0
        assert len(files_of(directory)) == len(before)
        if len(store.operations) <= fail_at:
            break
    print(f"{fail_at} operations: {outcomes} (2: a fault after the commit, or none)")
    assert outcomes.count(1.0) >= 8
    assert outcomes.count(2.0) >= 2


@pytest.mark.parametrize("error", [io_error, access_denied])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, error: Callable[[], OSError]) -> None:
    save(state(1.0), tmp_path / "c")
    probe = FaultyStore(LocalStore(tmp_path / "c"), kinds=READS)
    load(state(0.0), probe)
    for fail_at in range(len(probe.operations)):
        store = FaultyStore(LocalStore(tmp_path / "c"), kinds=READS, fail_at=fail_at, error=error)
        with pytest.raises(StorageError) as caught:
            load(state(0.0), store)
        assert str(tmp_path / "c") in str(caught.value)


def test_what_a_death_inside_of_the_commit_leaves_is_removed_by_the_next_save(tmp_path: Path) -> None:
    save(state(1.0), tmp_path / "c")
    (tmp_path / "c" / ".metadata.json.0123456789abcdef.tmp").write_text("half")
    (tmp_path / "c" / ".metadata.json.note").write_text("the user's own")
    save(state(2.0), tmp_path / "c")
    assert [f for f in files_of(tmp_path / "c") if f.startswith(".")] == [".metadata.json.note"]


def test_a_rank_lost_right_after_the_commit_does_not_take_the_checkpoint_with_it(tmp_path: Path) -> None:
    def shard(rank: int, value: float) -> dict[str, object]:
        return {"w": filled(value, 4, rank=rank, ranks=2)}

    gave_up = threading.Event()

    class SlowCommit(LocalStore):
        def replace(self, name: str, data: bytes) -> None:
            assert gave_up.wait(60)
            super().replace(name, data)

    def save_slowly(group: Group) -> None:
        try:
            save(shard(group.rank, 2.0), SlowCommit(tmp_path / "c"), group=group)
        finally:
            gave_up.set()

    SimulatedWorld(2).run(lambda group: save(shard(group.rank, 1.0), tmp_path / "c", group=group))
    # The other rank gives up at the last collective, during the commit: both see a failed save.
    outcomes = SimulatedWorld(2, timeout_s=2.0).outcomes(save_slowly)
    assert all(isinstance(outcome, RankFailedError) for outcome in outcomes)
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0] * 8


def test_an_error_that_is_not_ours_leaves_no_files_either(tmp_path: Path) -> None:
    class Broken(LocalStore):
        def write(self, name: str, data: bytes) -> None:
            raise ZeroDivisionError("a bug in someone's store")

    save(state(1.0), tmp_path / "c")
    before = names_of(tmp_path / "c")
    with pytest.raises(ZeroDivisionError):
        save(state(2.0), Broken(tmp_path / "c"))
    assert names_of(tmp_path / "c") == before


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
    save(state(2.0), tmp_path / "c", sharded_strategy=second)
    assert value_of(tmp_path / "c") == 2.0
    assert files_of(tmp_path / "c") == sorted(
        [*files_of(tmp_path / "fresh"), "notes.txt", "common-notes.txt"]
    )


@sampled(3)
@pytest.mark.parametrize("pair", [*PAIRS, (ZARR, ZARR)], ids=str)
def test_a_save_over_any_format_that_dies_anywhere_leaves_the_old_or_the_new_and_is_cleaned_up(
    tmp_path: Path, pair: tuple[Strategy, Strategy]
) -> None:
    first, second = pair
    save(state(3.0), tmp_path / "fresh")

    def save_first(directory: Path) -> None:
        save(state(1.0, "abz"), directory, sharded_strategy=first)

    outcomes = []
    for directory in after_each_death(tmp_path, second, before=save_first, step=2):
        outcomes.append(value_of(directory))
        save(state(3.0), directory)
        assert value_of(directory) == 3.0
        assert files_of(directory) == files_of(tmp_path / "fresh")
    assert outcomes[0] == 1.0
    assert set(outcomes) <= {1.0, 2.0}


@sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "megatron"])
def test_a_save_over_zarr_1_that_dies_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, strategy: Strategy, is_ours: bool
) -> None:
    arrays: set[str] = set()

    def save_zarr_1(directory: Path) -> None:
        save_zarr_v1(state(1.0, "abz"), directory, is_ours=is_ours)
        arrays.update(set(files_of(directory)) - {"common.pt"})

    outcomes = []
    for directory in after_each_death(tmp_path, strategy, before=save_zarr_1):
        outcomes.append(value_of(directory))
        save(state(3.0), directory)
        assert value_of(directory) == 3.0
        assert arrays <= set(files_of(directory))
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
