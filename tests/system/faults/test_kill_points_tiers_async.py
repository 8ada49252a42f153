"""A job stops at every moment of an asynchronous save into a tier: old or new, whichever node is lost.

Or the writer of one rank alone stops. Writers run in threads here, with all that real ones do, connections
between nodes too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megackpt import Checkpointer, CheckpointError, LocalTier
from megackpt.comm import Group, PeerBuffer
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.messages import Job
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.storage import Store
from megackpt.testing.crash_store import Stopped
from megackpt.testing.faulty_store import FaultyStore, Operation
from megackpt.testing.world import SimulatedWorld
from tests.core.run.test_tier_steps import Run, state
from tests.support.effort import tries_all
from tests.support.writers import saver_of
from tests.system.faults.test_kill_points_async import MortalGroup, MortalWriter, writers_on


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


def save_asynchronously(run: Run, nodes: Nodes, step: int) -> list[str]:
    """Save a step into the tier of two nodes; return the error of each, "" for none."""

    class AsyncCheckpointer(Checkpointer):
        _writer_hook = f"threads of {id(nodes)}"

    def act(group: Group) -> str:
        checkpointer = AsyncCheckpointer(
            run.base / "root",
            async_save=True,
            tiers=run.tiers_of(node=group.rank),
            group=group,
            timeout_s=20,
        )
        message = ""
        try:
            checkpointer.save(step, state(group, step, tp=2))
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


def files_of(run: Run) -> dict[str, bytes]:
    paths = (path for path in run.base.rglob("*") if path.is_file())
    return {str(path.relative_to(run.base)): path.read_bytes() for path in paths}


def test_an_asynchronous_save_into_a_tier_does_what_a_synchronous_one_does(tmp_path: Path) -> None:
    """So that what is shown of the one holds for the other."""
    seen: list[tuple[dict[int, list[str]], Any]] = []
    for number, save in enumerate((save_at_once, save_asynchronously)):
        run, nodes = run_of(tmp_path / str(number)), Nodes()
        with patch(
            "megackpt.engine.saving.preparation.new_attempt", side_effect=iter(f"{n:016x}" for n in range(9))
        ):
            run.save(1, nodes=range(2))
            assert not any(save(run, nodes, 2) or [])
        # The number of writes of a row differs: staged parts are contiguous.
        steps = {rank: [text for text, _ in groupby(texts)] for rank, texts in nodes.seen.items()}
        seen.append((steps, files_of(run)))
    assert seen[0] == seen[1]
    assert all(len(of_rank) > 10 for of_rank in seen[0][0].values())


def test_writers_killed_at_any_operation_of_a_save_into_a_tier_leave_the_old_step_or_the_new_one(
    tmp_path: Path,
) -> None:
    whole = Nodes()
    save_asynchronously(run_of(tmp_path / "whole"), whole, 2)
    count = sum(map(len, whole.seen.values()))
    points = range(count) if tries_all() else sorted(random.Random(0).sample(range(count), 4))
    results = set()
    for point, only_this_rank in product(points, (False, True)):
        run, nodes = (
            run_of(tmp_path / f"{point}-{only_this_rank}"),
            Nodes(stop_at=point, only_this_rank=only_this_rank),
        )
        run.save(1, nodes=range(2))
        errors = save_asynchronously(run, nodes, 2)
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
