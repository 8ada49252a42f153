"""The machine stops at every moment of a save, one after the other: old or new, never a mixture."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from unittest.mock import patch

import pytest
import torch

from megackpt import NotACheckpointError, SaveOptions, ShardedObject, ShardedTensor, load, save
from megackpt.storage import MemoryStore
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few

Strategy = tuple[str, int]
Files = dict[str, bytes]
STRATEGIES: list[Strategy] = [("megackpt", 1), ("torch_dist", 1), ("zarr", 3)]
ROWS = 8
DTYPES = {"f": torch.float32, "h": torch.bfloat16}


def state(value: int | None, *, rank: int = 0, ranks: int = 1) -> dict[str, object]:
    """A rank's part of a state in which everything is made from one number; None for one to be loaded."""
    rows = ROWS // ranks
    tensors = [
        ShardedTensor.from_rank_offsets(
            f"t.{n}", torch.full((rows, 3), value or 0, dtype=d), (0, rank, ranks)
        )
        for n, d in DTYPES.items()
    ]
    made = {"model": tensors, "o": ShardedObject("o", value and {"n": value}, (1,), (0,), replica_id=rank)}
    return made if value is None else made | {"value": value, "blob": torch.full((3,), value)}


def value_of(files: Files) -> int | None:
    """Load all there is, bit for bit what was saved with one value, and return that; None if nothing is."""
    try:
        loaded = load(state(None), MemoryStore(files=files))
    except NotACheckpointError:
        return None
    value = loaded["value"]
    expected = {
        "value": value,
        "blob": torch.full((3,), value),
        "model": [torch.full((ROWS, 3), value, dtype=d) for d in DTYPES.values()],
        "o": {"n": value},
    }
    assert difference(loaded, expected) is None
    return int(value)


def names_of(files: Files) -> list[str]:
    """The names, without what tells attempts from each other."""
    return sorted(re.sub(r"[0-9a-f]{16,32}", "X", name) for name in files)


def run_save(
    machine: CrashMachine, value: int, *, ranks: int, strategy: Strategy, options: SaveOptions | None = None
) -> None:
    """Save on a number of ranks, whatever becomes of it."""
    # Equal saves write equal files, so that most directories need to be looked at only once.
    attempt = patch("megackpt.engine.saving.preparation.new_attempt", return_value=f"{value:016x}")
    with suppress(Stopped), attempt:
        SimulatedWorld(ranks).outcomes(
            lambda group: save(
                state(value, rank=group.rank, ranks=ranks),
                machine.store(rank=group.rank),
                strategy,
                options=options,
                group=group,
            )
        )


def saved(value: int, *, ranks: int, strategy: Strategy) -> CrashMachine:
    machine = CrashMachine()
    run_save(machine, value, ranks=ranks, strategy=strategy)
    return machine


@dataclass
class Tally:
    """What was found after crashes, and which directories were looked at already."""

    strategy: Strategy
    before: int | None
    clean: list[str]
    value_of_files: dict[frozenset[tuple[str, bytes]], int | None] = field(default_factory=dict)
    crashes: int = 0

    def look(self, files: Files) -> int | None:
        """Check that a directory has the old or the new state, and that the next save works and cleans up."""
        self.crashes += 1
        seen = frozenset(files.items())
        if seen not in self.value_of_files:
            self.value_of_files[seen] = value_of(files)
            assert self.value_of_files[seen] in (self.before, 2)
            after = CrashMachine(files)
            run_save(after, 3, ranks=1, strategy=self.strategy)
            kept = after.restarted(Loss.EVERYTHING).disk.files_after(Loss.NOTHING)
            assert value_of(kept) == 3
            assert names_of(kept) == self.clean
        return self.value_of_files[seen]


@pytest.mark.parametrize(
    ("strategy", "ranks", "over", "only_this_rank"),
    [
        *product([STRATEGIES[0]], [1, 4], [None, 1], [False, True]),
        *product(STRATEGIES[1:], [1], [None], [False]),  # the other cases of these take minutes
    ],
    ids=str,
)
def test_a_crash_at_any_moment_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    strategy: Strategy, ranks: int, over: int | None, only_this_rank: bool
) -> None:
    losses = (Loss.NOTHING, Loss.EVERYTHING) if only_this_rank else tuple(Loss)
    before = {} if over is None else saved(1, ranks=2, strategy=strategy).disk.files_after(Loss.NOTHING)
    clean = saved(3, ranks=1, strategy=strategy).disk.files_after(Loss.EVERYTHING)
    tally = Tally(strategy, over, names_of(clean))
    outcomes: set[int | None] = set()
    for rank in range(ranks):
        for index in range(10_000):
            machine = CrashMachine(
                before, stop_at=Moment(rank=rank, index=index, only_this_rank=only_this_rank)
            )
            run_save(machine, 2, ranks=ranks, strategy=strategy)
            seen = {tally.look(machine.restarted(loss).disk.files_after(Loss.NOTHING)) for loss in losses}
            outcomes |= seen
            if not machine.has_stopped:  # all of the save's moments have been seen
                assert seen == {2}
                break
        assert index >= 8
    assert outcomes == {over, 2}
    print(f"{tally.crashes} crashes, {len(tally.value_of_files)} different directories")


def test_a_crash_at_any_moment_of_a_save_with_parity_leaves_nothing_that_stays() -> None:
    """Over a checkpoint with parity. With --all on two ranks, each of which writes a parity file."""
    ranks = few(1, of=2)
    parity, native = SaveOptions(parity=1), STRATEGIES[0]
    machine = CrashMachine()
    run_save(machine, 1, ranks=ranks, strategy=native, options=parity)
    before = machine.disk.files_after(Loss.NOTHING)
    clean = saved(3, ranks=1, strategy=native).disk.files_after(Loss.EVERYTHING)
    tally = Tally(native, 1, names_of(clean))
    outcomes: set[int | None] = set()
    for rank in range(ranks):
        for index in range(10_000):
            machine = CrashMachine(before, stop_at=Moment(rank=rank, index=index))
            run_save(machine, 2, ranks=ranks, strategy=native, options=parity)
            for loss in Loss:
                outcomes.add(tally.look(machine.restarted(loss).disk.files_after(Loss.NOTHING)))
            if not machine.has_stopped:
                break
        assert index > 8
    assert outcomes == {1, 2}
    left = machine.disk.files_after(Loss.NOTHING)
    assert sum(name.startswith("parity/") for name in left) == ranks
