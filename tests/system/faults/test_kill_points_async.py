"""Writer processes stop at every moment of an asynchronous save: old or new, never a mixture.

What stops is either a writer that runs in a thread here, with all that a real one does, on a crash machine;
or a real process, which kills itself.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megackpt import AsyncOptions, Checkpointer, CheckpointError, RankFailedError, SaveOptions, ShardedTensor
from megackpt.comm import Group
from megackpt.comm.store_group import StoreGroup
from megackpt.engine.background.child_process import ChildProcess
from megackpt.engine.background.messages import CheckpointLocation, Job
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.background.writer_main import Writer
from megackpt.engine.saving.save_request import save_request
from megackpt.storage import Store
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import tries_all
from tests.support.writers import ORDER, Order
from tests.system.faults.test_kill_points import STRATEGIES, Files, Tally, names_of, run_save, saved, state

NATIVE = STRATEGIES[0]
OPTIONS = SaveOptions(timeout_s=20)


class Listening(CrashMachine):
    """A machine that tells which moments each rank came to."""

    def __init__(self, files: Files | None = None, *, stop_at: Moment | None = None) -> None:
        super().__init__(files, stop_at=stop_at)
        self.texts: dict[int, list[str]] = {}

    def moment(self, rank: int, text: str) -> None:
        super().moment(rank, text)
        self.texts.setdefault(rank, []).append(text)


class MortalGroup(StoreGroup):
    """Writers that meet as long as they live."""

    machine: CrashMachine

    def all_gather(self, data: bytes) -> list[bytes]:
        self.machine.check_alive(self.rank)
        return super().all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        self.machine.check_alive(self.rank)
        return super().gather(data)

    def all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        self.machine.check_alive(self.rank)
        return super().all_reduce_max(numbers, step=step)

    def leave(self) -> None:
        with suppress(Stopped):
            self.machine.check_alive(self.rank)
            super().leave()


class MortalWriter(Writer):
    """A writer in a thread, which is no more when its machine has stopped; also its own process object."""

    pid = 0
    returncode: int | None = None

    def __init__(self, machine: CrashMachine, end: socket.socket, arena: int) -> None:
        self._machine, self._end = machine, end
        super().__init__(Connection(os.dup(end.fileno())), arena, self._crash_store)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("writer", timeout or 0)
        self.returncode = -9
        return -9

    def kill(self) -> None:
        with suppress(OSError):  # closed already
            self._end.shutdown(socket.SHUT_RDWR)

    def _live(self) -> None:
        self.run()
        self._todo.put(_nothing_more())  # type: ignore[arg-type]
        self.kill()

    def _work(self) -> None:
        with suppress(Stopped, OSError):  # the rank may have closed its end, with which a real one is killed
            super()._work()
        self.kill()

    def _crash_store(self, store: Store) -> Store:
        store.close()
        return self._machine.store(rank=self._join.rank)

    def _group(self, job: Job) -> Group:
        group = super()._group(job)
        if isinstance(group, StoreGroup):
            group.__class__ = MortalGroup
            group.machine = self._machine  # type: ignore[attr-defined]
        return group


def _nothing_more() -> Iterator[Any]:
    raise Stopped("left")
    yield


@contextmanager
def writers_on(machine: CrashMachine, kind: type[MortalWriter] = MortalWriter) -> Iterator[None]:
    """Within the block, writers are threads here, which write to a crash machine."""
    ends = ExitStack()

    def start(_: object, arena: int) -> ChildProcess:
        ours, theirs = socket.socketpair()
        ends.enter_context(theirs)
        process: Any = kind(machine, theirs, arena)
        return ChildProcess(process, Connection(ours.detach()))

    with ends, patch("megackpt.engine.background.process.start_writer", start):
        yield


def save_asynchronously(machine: CrashMachine, value: int, *, ranks: int) -> list[str]:
    """Save asynchronously on a number of ranks; return the error of each, "" for none."""

    def work(group: Group) -> str:
        saver = AsyncSaver(AsyncOptions(), hook=f"threads of {id(machine)}")
        try:
            saver.may_save(group, OPTIONS)
            destination = Destination(
                request=save_request(
                    state(value, rank=group.rank, ranks=ranks), NATIVE, options=OPTIONS, group=group
                ),
                location=CheckpointLocation(root="/nowhere", name="step"),
                label="the step",
                on_commit=lambda _: None,
                on_failure=lambda _: False,
            )
            saver.save([destination], group, OPTIONS)
            saver.wait()
        except CheckpointError as error:
            return str(error)
        finally:
            saver.abandon()
        return ""

    attempt = patch("megackpt.engine.saving.preparation.new_attempt", return_value=f"{value:016x}")
    looks = patch("megackpt.comm.store_group.LOOK_EVERY_S", 0.02)
    with writers_on(machine), attempt, looks:
        return SimulatedWorld(ranks).run(work)


def before(over: int | None) -> Files:
    return {} if over is None else saved(1, ranks=2, strategy=NATIVE).disk.files_after(Loss.NOTHING)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("over", [None, 1])
def test_an_asynchronous_save_does_what_a_synchronous_one_does(ranks: int, over: int | None) -> None:
    """So that what is shown of the one, with every strategy, holds for the other."""
    first, other = Listening(before(over)), Listening(before(over))
    run_save(first, 2, ranks=ranks, strategy=NATIVE)
    assert save_asynchronously(other, 2, ranks=ranks) == [""] * ranks
    assert {r: texts for r, texts in other.texts.items()} == first.texts
    assert other.disk.files_after(Loss.NOTHING) == first.disk.files_after(Loss.NOTHING)


@pytest.mark.parametrize(
    ("ranks", "over", "only_this_rank"), [(1, 1, False), (4, None, True), (4, 1, False), (4, 1, True)]
)
def test_a_crash_of_writers_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    ranks: int, over: int | None, only_this_rank: bool
) -> None:
    if ranks > 1 and (over is None or not only_this_rank) and not tries_all():
        pytest.skip("only with --all")
    losses = (Loss.NOTHING, Loss.EVERYTHING) if only_this_rank else tuple(Loss)
    files = before(over)
    tally = Tally(
        NATIVE, over, names_of(saved(3, ranks=1, strategy=NATIVE).disk.files_after(Loss.EVERYTHING))
    )
    whole = Listening(files)
    save_asynchronously(whole, 2, ranks=ranks)
    moments = [(rank, index) for rank in range(ranks) for index in range(whole.passed[rank])]
    if ranks > 1 and not tries_all():
        moments = random.Random(0).sample(moments, 4)
    outcomes: set[int | None] = set()
    for rank, index in moments:
        machine = CrashMachine(files, stop_at=Moment(rank=rank, index=index, only_this_rank=only_this_rank))
        errors = save_asynchronously(machine, 2, ranks=ranks)
        assert machine.has_stopped
        assert all(errors), (rank, index, errors)  # the writers are lost, and every rank is told
        for loss in losses:
            outcomes.add(tally.look(machine.restarted(loss).disk.files_after(Loss.NOTHING)))
    if len(moments) > 10:
        assert outcomes == {over, 2}
    directories = len(tally.value_of_files)
    print(f"{len(moments)} moments, {tally.crashes} crashes, {directories} different directories")


class Mortal(Checkpointer):
    _writer_hook = "tests.support.writers:at_an_operation"


def part(value: float) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.full((64,), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, size)), "step": int(value)}


def kill_writers(root: Path, points: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Kill the writer of a rank before or after one of its operations: each of these, or all there are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    done: list[tuple[int, int]] = []
    with Mortal(root, keep_last=2, async_save=True, timeout_s=60) as checkpointer:
        good = 1
        checkpointer.save(good, part(good))
        checkpointer.wait()
        queue = list(points) if points is not None else [(0, 0)]
        while queue:
            victim, point = queue.pop(0)
            dist.barrier()
            if rank == victim:
                Order(trainer=os.getpid(), before=point, how="dies").give(root)
            dist.barrier()
            step, message = good + 1, ""
            try:
                checkpointer.save(step, part(step))
                checkpointer.wait()
            except RankFailedError as error:
                message = str(error)
            dist.barrier()
            (root.parent / ORDER).unlink(missing_ok=True)
            message_text: list[str] = [""] * size
            dist.all_gather_object(message_text, message)
            if any(message_text):
                done.append((victim, point))
                assert all(f"writer process of rank {victim} " in text for text in message_text), message_text
                assert all("killed by SIGKILL" in text for text in message_text), message_text
            newest = checkpointer.find_latest()
            assert newest in ((good, step) if any(message_text) else (step,))
            loaded = checkpointer.load(part(0))
            assert loaded["step"] == newest
            assert torch.equal(loaded["w"], torch.full((64,), float(newest)))
            good = newest + 1
            checkpointer.save(good, part(good))
            checkpointer.wait()
            dist.barrier()
            assert checkpointer.latest() == good
            if points is None and any(message_text):
                queue = [(victim, point + 1)]
            elif points is None and victim + 1 < size:
                queue = [(victim + 1, 0)]
    return done


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_writer_process_killed_at_any_operation_loses_nothing(
    rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    chance = random.Random(0)
    points = None if tries_all() else [(chance.randrange(ranks), chance.randrange(6))]
    if ranks > 1 and not tries_all():  # to start writers takes seconds
        pytest.skip("only with --all")
    everyone = rank_pool.run(kill_writers, ranks, tmp_path / "root", points, timeout_s=1200)
    print(f"killed at {len(everyone[0])} points: {everyone[0]}")
    assert len(everyone[0]) >= (1 if points is not None else 15)
    for step in (checkpointer := Checkpointer(tmp_path / "root")).steps():
        loaded = checkpointer.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(64 * ranks))}, step)
        assert torch.equal(loaded["w"], torch.full((64 * ranks,), float(step)))
