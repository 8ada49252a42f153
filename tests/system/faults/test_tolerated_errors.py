"""Saves that the system rejects: disk full, read-only, forbidden. Training goes on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megackpt import Checkpointer, DeclarationError, StorageError, load, save
from megackpt.comm import Group, SingleProcess
from megackpt.storage import MemoryStore
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import contents
from tests.support.states import filled

RANKS = 2
Reject = Callable[[Path], contextlib.AbstractContextManager[None]]


def state(group: Group, value: float, rows: int = 1000) -> dict[str, object]:
    return {"w": filled(value, rows, rank=group.rank, ranks=group.size), "value": value}


def mounted(mount: Path, *arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments, str(mount)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted(mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@contextlib.contextmanager
def full(root: Path) -> Iterator[None]:
    with contextlib.suppress(OSError), (root / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    try:
        yield
    finally:
        (root / "ballast").unlink()


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    mounted(root, "-o", "remount,ro")
    try:
        yield
    finally:
        mounted(root, "-o", "remount,rw")


@contextlib.contextmanager
def in_the_way(root: Path) -> Iterator[None]:
    (root / "iter_0000002").write_text("a file where the directory should be")
    try:
        yield
    finally:
        (root / "iter_0000002").unlink()


@contextlib.contextmanager
def limited(root: Path) -> Iterator[None]:
    """A limit of processes: no file may be larger (Python ignores the signal that comes with it)."""
    lists = Path("/proc/self/task").glob("*/children")  # writer processes are among them
    processes = [os.getpid(), *(int(pid) for pids in lists for pid in pids.read_text().split())]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for pid in processes:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        yield
    finally:
        for pid in processes:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("reject", "message"),
    [
        (full, "No space left on device"),
        (read_only, "Read-only file system"),
        (in_the_way, "is a file where a directory is needed"),
        (limited, "File too large"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_after_a_failed_save_and_none_of_its_files_is_left(
    disk: Path, caplog: pytest.LogCaptureFixture, reject: Reject, message: str, asynchronous: bool
) -> None:
    def train(group: Group) -> tuple[list[bool], int, float]:
        made = []
        with Checkpointer(
            disk, keep_last=1, save_interval=1, on_error="warn", async_save=asynchronous, group=group
        ) as checkpointer:
            for step in (1, 2, 3):
                if step == 2:
                    with reject(disk) if group.rank == 0 else contextlib.nullcontext():
                        before = contents(disk) if group.rank == 0 else {}
                        group.all_gather(b"")
                        made.append(checkpointer.maybe_save(2, lambda: state(group, 2.0)))
                        checkpointer.wait()
                        group.all_gather(b"")
                        if group.rank == 0:
                            assert contents(disk) == before
                            assert not (disk / "iter_0000002").is_dir()
                    assert checkpointer.load(state(group, 0.0))["value"] == 1.0
                else:
                    made.append(checkpointer.maybe_save(step, lambda s=step: state(group, float(s))))
                    checkpointer.wait()
            loaded = checkpointer.load(state(group, 0.0))
        return made, checkpointer.failed_saves, float(loaded["w"].unique())

    with caplog.at_level(logging.WARNING):
        outcomes = [train(SingleProcess())] if asynchronous else SimulatedWorld(RANKS).run(train)
    # An asynchronous save meets the error in the writer process, after `save` has returned.
    assert outcomes == [([True, asynchronous, True], 1, 3.0)] * len(outcomes)
    assert "Saving step 2 failed (rank " in caplog.text
    assert message in caplog.text
    assert Checkpointer(disk).steps() == (3,)


def test_a_disk_that_is_really_full_is_named_with_what_was_needed_and_the_old_checkpoint_stays(
    disk: Path,
) -> None:
    group = SingleProcess()
    save(state(group, 1.0), disk / "c")
    before = contents(disk / "c")
    with pytest.raises(StorageError, match=r"No space left on device.*4,\d+,\d+ bytes were needed.*are free"):
        save(state(group, 2.0, rows=1 << 20), disk / "c")
    assert contents(disk / "c") == before
    assert load(state(group, 0.0), disk / "c")["value"] == 1.0


@pytest.mark.parametrize("options", [{}, {"on_error": "raise"}])
def test_with_on_error_raise_a_failed_save_is_raised_on_all_ranks(
    tmp_path: Path, options: dict[str, str]
) -> None:
    (tmp_path / "iter_0000002").write_text("a file where the directory should be")

    def save(group: Group) -> None:
        Checkpointer(tmp_path, group=group, **options).save(2, state(group, 2.0))

    outcomes = SimulatedWorld(RANKS).outcomes(save)
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)


def test_mistakes_of_the_caller_are_raised_even_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, on_error="warn")
    with pytest.raises(DeclarationError, match="step is -1"):
        checkpointer.save(-1, {})
    with pytest.raises(TypeError):
        checkpointer.save(1, {"thread": object()})
    assert checkpointer.failed_saves == 0
    assert checkpointer.scan().incomplete == ()
    assert not (tmp_path / "iter_0000001").exists()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_a_missing_permission_is_a_warning_and_training_goes_on(
    open_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    Checkpointer(open_directory).save(1, {"a": 1})
    before = contents(open_directory)
    os.seteuid(65534)
    try:
        checkpointer = Checkpointer(open_directory, on_error="warn")
        checkpointer.save(2, {"a": 2})
        assert checkpointer.load({}) == {"a": 1}
        assert checkpointer.failed_saves == 1
    finally:
        os.seteuid(0)
    assert "Permission denied" in caplog.text
    assert contents(open_directory) == before


WRITES = {"create", "open_writer", "writer.write", "writer.close", "write", "replace"}


def test_a_quota_that_is_reached_at_any_write_costs_one_save_and_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def over_quota() -> OSError:
        return OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    group, outcomes = SingleProcess(), []
    for first in range(100):
        root = MemoryStore()
        Checkpointer(root, group=group).save(1, state(group, 1.0), metrics={"loss": 1.0})
        limited = FaultyStore(
            root, fail_at=lambda op, first=first: op.index >= first, error=over_quota, kinds=WRITES
        )
        checkpointer = Checkpointer(limited, keep_last=1, on_error="warn", group=group)
        is_saved = checkpointer.save(2, state(group, 2.0), metrics={"loss": 2.0})
        outcomes.append(is_saved)
        assert checkpointer.failed_saves == (not is_saved)
        after = Checkpointer(root, keep_last=1, group=group)
        assert after.steps()[-1] == 1 + is_saved
        assert after.load(state(group, 0.0))["value"] == 1.0 + is_saved
        if not is_saved:
            assert not [name for name in root.names() if "iter_0000002" in name]
        assert after.save(3, state(group, 3.0))
        assert not [name for name in root.names() if "iter_000000" in name and "iter_0000003" not in name]
        if len(limited.operations) <= first:
            break
    # The last write of all, after the commit, is that of the tracker: without it the step is saved, too.
    assert outcomes == [False] * (len(outcomes) - 2) + [True, True]
    assert "Disk quota exceeded" in caplog.text
