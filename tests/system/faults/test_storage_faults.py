"""A store that rejects at any one operation: the save fails as a whole, or has succeeded."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megackpt import RankFailedError, ShardedTensor, StorageError, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import READS, FaultyStore, access_denied, io_error, no_space
from megackpt.testing.world import SimulatedWorld
from tests.support.states import filled


def state(value: float) -> dict[str, object]:
    tensors = [filled(value, 1000, key=f"t{i}") for i in range(3)]
    return {"model": tensors, "value": value, "blob": torch.full((3,), value)}


def value_of(directory: Path) -> float:
    """Load everything there is and return the one value that all of it has."""
    values = {float(v) for t in load_plain_tensors(directory).values() for v in t.unique()}
    common = load({}, directory)
    values |= {common["value"], *common["blob"].tolist()}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


def files_of(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def error_of(store: FaultyStore) -> StorageError | None:
    """Save other values and return the error, if there was one."""
    try:
        save(state(2.0), store)
    except StorageError as error:
        return error
    return None


@pytest.mark.parametrize("error", [no_space, io_error, access_denied])
def test_a_save_that_fails_at_any_operation_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, error: Callable[[], OSError]
) -> None:
    failed = succeeded = 0
    for fail_at in range(200):
        directory = tmp_path / f"{fail_at}"
        save(state(1.0), directory)
        before = files_of(directory)
        store = FaultyStore(LocalStore(directory), fail_at=fail_at, error=error)
        reason = error_of(store)
        if reason is None:
            succeeded += 1
            assert value_of(directory) == 2.0
        else:
            failed += 1
            assert str(directory) in str(reason)
            assert value_of(directory) == 1.0
            assert files_of(directory) == before
        save(state(3.0), directory)  # the next save works, and cleans up what could not be removed
        assert value_of(directory) == 3.0
        assert len(files_of(directory)) == len(before)
        if len(store.operations) <= fail_at:
            break
    print(
        f"{fail_at} operations: {failed} failed saves, {succeeded} successes (faults after the commit, or "
        f"none)"
    )
    assert failed >= 8
    assert succeeded >= 2


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_really_full_is_named_with_what_was_needed_and_the_old_checkpoint_stays(
    small_disk: Path,
) -> None:
    save(state(1.0), small_disk / "c")
    before = files_of(small_disk / "c")
    large = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1 << 20))}
    with pytest.raises(StorageError, match=r"No space left on device.*4,\d+,\d+ bytes were needed.*are free"):
        save(large, small_disk / "c")
    assert value_of(small_disk / "c") == 1.0
    assert files_of(small_disk / "c") == before


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
    before = files_of(tmp_path / "c")
    with pytest.raises(ZeroDivisionError):
        save(state(2.0), Broken(tmp_path / "c"))
    assert files_of(tmp_path / "c") == before
