"""Writer processes stop at every moment of an asynchronous save: old or new, never a mixture.

What stops is either a writer that runs in a thread here, with all that a real one does, on a crash machine;
or a real process, which kills itself. The same of saves into a tier, with connections between nodes.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby, product
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    CheckpointError,
    LocalTier,
    RankFailedError,
    ShardedTensor,
)
from megackpt.comm import Group, PeerBuffer
from megackpt.comm.store_group import StoreGroup
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.child_process import ChildProcess
from megackpt.engine.background.messages import CheckpointLocation, Job
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.background.writer_main import Writer
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.saving.save_request import save_request
from megackpt.storage import Store
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.faulty_store import FaultyStore, Operation
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.core.run.test_tier_steps import Run
from tests.core.run.test_tier_steps import state as tier_state
from tests.support.checkpoints import contents
from tests.support.effort import tries_all, with_all
from tests.support.writers import OPTIONS, ORDER, Order, saver_of
from tests.system.faults.test_kill_points import (
    STRATEGIES,
    Files,
    Listening,
    Tally,
    names_of,
    numbered_attempt,
    run_save,
    saved,
    state,
)

NATIVE = STRATEGIES[0]


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
                request=save_request(state(value, rank=group.rank, ranks=ranks), NATIVE, options=OPTIONS),
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

    looks = patch("megackpt.comm.store_group.LOOK_EVERY_S", 0.02)
    with writers_on(machine), numbered_attempt(value), looks:
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


MINUTES = with_all(
    "every moment of four writers takes minutes; one writer, and some moments of four are tried"
)


@pytest.mark.parametrize(
    ("ranks", "over", "only_this_rank"),
    [
        (1, 1, False),
        pytest.param(4, None, True, marks=MINUTES),
        pytest.param(4, 1, False, marks=MINUTES),
        (4, 1, True),
    ],
)
def test_a_crash_of_writers_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    ranks: int, over: int | None, only_this_rank: bool
) -> None:
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


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=with_all("to start writers takes seconds"))])
def test_a_writer_process_killed_at_any_operation_loses_nothing(
    rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    chance = random.Random(0)
    points = None if tries_all() else [(chance.randrange(ranks), chance.randrange(6))]
    everyone = rank_pool.run(kill_writers, ranks, tmp_path / "root", points, timeout_s=1200)
    print(f"killed at {len(everyone[0])} points: {everyone[0]}")
    assert len(everyone[0]) >= (1 if points is not None else 15)
    for step in (checkpointer := Checkpointer(tmp_path / "root")).steps():
        loaded = checkpointer.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(64 * ranks))}, step)
        assert torch.equal(loaded["w"], torch.full((64 * ranks,), float(step)))


# Into a tier: the new step or the old one, whichever node is lost.


class Nodes:
    """The machines of a job, which stop before an operation on a directory of theirs: all, or one alone."""

    def __init__(self, *, stop_at: int | None = None, only_this_rank: bool = False) -> None:
        self.seen: dict[int, list[str]] = {}
        self.has_stopped = False
        self.stopped: int | None = None  # the rank
        self._stop_at, self._only_this_rank = stop_at, only_this_rank
        self._count = 0
        self._lock = threading.Lock()

    def around(self, store: Store, rank: int) -> Store:
        """Return the store of a rank's node, on which it acts as long as it lives."""

        def listen(operation: Operation) -> bool:
            with self._lock:
                if self._count == self._stop_at:
                    self.has_stopped, self.stopped = True, rank
                self._count += 1
                self.check_alive(rank)
                self.seen.setdefault(rank, []).append(f"{operation.kind} {operation.name}")
            return False

        return FaultyStore(store, fail_at=listen)

    def check_alive(self, rank: int) -> None:
        """Raise what ends a process that is no more."""
        if self.has_stopped and (rank == self.stopped or not self._only_this_rank):
            raise Stopped(f"rank {rank}")


class MortalWriterGroup(MortalGroup, WriterGroup):
    """Writers that send each other files as long as they live."""

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        self.machine.check_alive(self.rank)
        super().exchange(sends, receives)

    def leave(self) -> None:
        super().leave()
        self.close_transport()  # the system closes the connections of a dead process


class NodeWriter(MortalWriter):
    """A writer in a thread whose node may stop."""

    def _crash_store(self, store: Store) -> Store:
        return self._machine.around(store, self._join.rank)  # type: ignore[attr-defined]

    def _group(self, job: Job) -> Group:
        group = super()._group(job)
        if isinstance(group, MortalGroup):
            group.__class__ = MortalWriterGroup
        return group


def run_of(base: Path) -> Run:
    return Run(base, per_node=1, tiers=[LocalTier(f"{base}/node-{{node}}/memory", keep_last=1)])


def save_into_tiers(run: Run, nodes: Nodes, step: int) -> list[str]:
    """Save a step into the tier of two nodes; return the error of each, "" for none."""

    class AsyncCheckpointer(Checkpointer):
        _writer_hook = f"threads of {id(nodes)}"

    def act(group: Group) -> str:
        checkpointer = AsyncCheckpointer(
            run.base / "root", async_save=True, tiers=run.tiers_of(node=group.rank), group=group, timeout_s=20
        )
        message = ""
        try:
            checkpointer.save(step, tier_state(group, step, tp=2))
            checkpointer.wait()
        except CheckpointError as error:
            message = str(error)
        group.all_gather(b"")  # the store that writers meet in is hosted by rank 0
        saver_of(checkpointer).abandon()
        return message

    looks = patch("megackpt.comm.store_group.LOOK_EVERY_S", 0.02)
    with writers_on(nodes, NodeWriter), looks:  # type: ignore[arg-type]
        return SimulatedWorld(2).run(act)


def save_at_once(run: Run, nodes: Nodes, step: int) -> None:
    open_well = LocalSteps.open

    def open_around(locations: LocalSteps, name: str) -> Store:
        rank = int(Path(locations.location).parent.name.removeprefix("node-"))
        return nodes.around(open_well(locations, name), rank)

    with patch.object(LocalSteps, "open", open_around):
        run.save(step, nodes=range(2))


def test_an_asynchronous_save_into_a_tier_does_what_a_synchronous_one_does(tmp_path: Path) -> None:
    """So that what is shown of the one holds for the other."""
    seen: list[tuple[dict[int, list[str]], Any]] = []
    for number, save in enumerate((save_at_once, save_into_tiers)):
        run, nodes = run_of(tmp_path / str(number)), Nodes()
        numbers = (f"{n:016x}" for n in range(9))
        one_run = SimpleNamespace(token_hex=lambda count: "0" * 2 * count)
        with (
            patch("megackpt.engine.saving.preparation.new_attempt", side_effect=numbers),
            patch("megackpt.run.checkpointer.branches.secrets", one_run),
        ):
            run.save(1, nodes=range(2))
            assert not any(save(run, nodes, 2) or [])
        # The number of writes of a row differs: staged parts are contiguous.
        steps = {rank: [text for text, _ in groupby(texts)] for rank, texts in nodes.seen.items()}
        seen.append((steps, contents(run.base)))
    assert seen[0] == seen[1]
    assert all(len(of_rank) > 10 for of_rank in seen[0][0].values())


def test_writers_killed_at_any_operation_of_a_save_into_a_tier_leave_the_old_step_or_the_new_one(
    tmp_path: Path,
) -> None:
    whole = Nodes()
    save_into_tiers(run_of(tmp_path / "whole"), whole, 2)
    count = sum(map(len, whole.seen.values()))
    points = range(count) if tries_all() else sorted(random.Random(0).sample(range(count), 4))
    results = set()
    for point, only_this_rank in product(points, (False, True)):
        run, nodes = (
            run_of(tmp_path / f"{point}-{only_this_rank}"),
            Nodes(stop_at=point, only_this_rank=only_this_rank),
        )
        run.save(1, nodes=range(2))
        errors = save_into_tiers(run, nodes, 2)
        assert nodes.stopped is not None
        who = f"writer process of rank {nodes.stopped} " if only_this_rank else "writer process of rank"
        assert all(who in error and "while saving step 2" in error for error in errors), (point, errors)
        run.lose(point % 2)  # so that what the other one says it has must be all there is
        used = run.load(nodes=range(2))
        assert used.step in (1, 2), point
        assert used.skipped == (), point
        results.add(used.step)
        run.save(3, nodes=range(2))
        assert [run.kept(node) for node in range(2)] == [["iter_0000003"]] * 2, point
    print(f"{len(points)} of {count} operations")
    assert len(points) < 10 or results == {1, 2}
