"""The machine stops at every moment of a save that removes older steps: what should stay loads."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch

from megackpt import Checkpointer, KeepBest, Retention, ShardedTensor
from megackpt.comm import Group
from megackpt.storage import MemoryStore
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import contents
from tests.support.effort import with_all
from tests.system.faults.test_kill_points import Files, Listening, numbered_attempt

ROWS = 8
LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 6.0, 5: 3.0, 6: 7.0}
TRACKER = "latest_checkpointed_iteration.txt"


def state(step: int, *, rank: int = 0, ranks: int = 1) -> dict[str, object]:
    part = torch.full((ROWS // ranks, 3), float(step), dtype=torch.bfloat16)
    return {"w": ShardedTensor.from_rank_offsets("w", part, (0, rank, ranks)), "step": step}


def check_loads(checkpointer: Checkpointer, step: int) -> None:
    loaded = checkpointer.load(state(0), step)
    assert loaded["step"] == step
    assert torch.equal(loaded["w"], torch.full((ROWS, 3), float(step), dtype=torch.bfloat16))


def run_save(machine: CrashMachine, step: int, *, ranks: int) -> None:
    """Save a step after which the pinned 1, the best 2 and the step itself stay, whatever becomes of it."""

    def save(group: Group) -> None:
        retention = Retention(keep_last=1, keep_best=KeepBest(metric="loss"))
        root = machine.store(rank=group.rank)
        with Checkpointer(root, retention=retention, group=group) as checkpointer:
            saved = state(step, rank=group.rank, ranks=group.size)
            checkpointer.save(step, saved, metrics={"loss": LOSSES[step]})

    with suppress(Stopped), numbered_attempt(step):
        SimulatedWorld(ranks).outcomes(save)


def before() -> Files:
    """Committed are 1, pinned, 2, the best, and 3, the newest; 4 is incomplete. All of it is durable."""
    store = MemoryStore()
    with Checkpointer(store) as checkpointer:
        for step in (1, 2, 3, 4):
            with numbered_attempt(step):
                checkpointer.save(step, state(step), metrics={"loss": LOSSES[step]})
        checkpointer.pin(1)
    files = contents(store)
    del files["iter_0000004/metadata.json"]
    return files | {TRACKER: b"3"}


@dataclass
class Tally:
    """What was found after crashes, and which directories were looked at already."""

    ranks: int
    step_of_files: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    crashes: int = 0

    def look(self, files: Files) -> int:
        """Return the newest step, and check that all is right and that the next save puts it in order."""
        self.crashes += 1
        seen = frozenset(files.items())
        if seen not in self.step_of_files:
            self.step_of_files[seen] = self._look(files)
        return self.step_of_files[seen]

    def _look(self, files: Files) -> int:
        checkpointer = Checkpointer(MemoryStore(files=files))
        newest = checkpointer.latest()
        assert newest in (3, 5)
        assert checkpointer.steps() in ((1, 2, 3), (1, 2, 3, 5), (1, 2, 5))
        for step in checkpointer.steps():
            check_loads(checkpointer, step)
            if step != 3:  # which has lost its metrics if it is about to go
                assert checkpointer.metrics(step) == {"loss": LOSSES[step]}
        assert checkpointer.pins() == (1,)
        assert files.get(TRACKER) in (b"3", b"5")

        after = CrashMachine(files)
        run_save(after, 6, ranks=self.ranks)
        kept = after.restarted(Loss.EVERYTHING).disk.files_after(Loss.NOTHING)
        checkpointer = Checkpointer(MemoryStore(files=kept))
        assert checkpointer.steps() == (1, 2, 6)
        for step in checkpointer.steps():
            check_loads(checkpointer, step)
        tops = {name.partition("/")[0] for name in kept}
        assert tops == {".megackpt", TRACKER, *(f"iter_000000{step}" for step in (1, 2, 6))}
        notes = {name.rpartition("/")[2] for name in kept if name.startswith(".megackpt/metrics/")}
        assert notes == {f"iter_000000{step}.json" for step in (1, 2, 6)}
        assert not [name for name in kept if re.search(r"\.tmp$", name)]
        assert kept[TRACKER] == b"6"
        return newest


@pytest.mark.parametrize(
    ("ranks", "only_this_rank"),
    [(1, False), (4, False), pytest.param(4, True, marks=with_all("of saves without a removal it is tried"))],
)
def test_a_crash_at_any_moment_of_a_retention_pass_loses_nothing_that_should_stay(
    ranks: int, only_this_rank: bool
) -> None:
    files, tally, outcomes = before(), Tally(ranks), list[set[int]]()
    losses = (Loss.NOTHING, Loss.EVERYTHING) if ranks > 1 else tuple(Loss)
    listening = Listening(files)
    run_save(listening, 5, ranks=ranks)
    assert tally.look(listening.restarted(Loss.EVERYTHING).disk.files_after(Loss.NOTHING)) == 5
    texts = listening.texts[0]
    commit = texts.index("before replace of 'iter_0000005/metadata.json'")
    noted = [i for i, text in enumerate(texts) if ".megackpt/metrics/iter_0000005.json" in text]
    for index in (*noted, *range(commit, len(texts))):  # test_kill_points.py has those in between
        machine = CrashMachine(files, stop_at=Moment(rank=0, index=index, only_this_rank=only_this_rank))
        run_save(machine, 5, ranks=ranks)
        assert machine.has_stopped
        outcomes.append(
            {tally.look(machine.restarted(loss).disk.files_after(Loss.NOTHING)) for loss in losses}
        )
    assert outcomes[: len(noted) + 1] == [{3}] * (len(noted) + 1)
    # Once the commit is durable it is the newest, whatever happens while others are removed.
    durable = outcomes.index({5})
    assert outcomes[durable:] == [{5}] * (len(outcomes) - durable)
    print(f"{len(outcomes)} moments, {len(outcomes) - durable} of them after the commit; ", end="")
    print(f"{tally.crashes} crashes, {len(tally.step_of_files)} different directories")
    assert len(outcomes) - durable > 15
