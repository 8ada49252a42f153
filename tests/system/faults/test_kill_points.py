"""The machine stops at every moment of a save, one after the other: old or new, never a mixture.

Of a repair: no file is worse then, and the next repair ends it. A process that is killed while it exports
leaves no half model; the next one makes an equal folder.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megackpt import (
    LoadOptions,
    NotACheckpointError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    repair,
    save,
)
from megackpt.comm import Group
from megackpt.storage import LocalStore, MemoryStore
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import contents
from tests.support.effort import few
from tests.support.huggingface_folders import saved_model
from tests.training.models.test_huggingface_export import (
    BUFFER_BYTES,
    FILE_BYTES,
    LLAMA,
    assert_listed_files_are_whole,
    export,
)

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


class Listening(CrashMachine):
    """A machine that tells which moments each rank came to."""

    def __init__(self, files: Files | None = None) -> None:
        super().__init__(files)
        self.texts: dict[int, list[str]] = {}

    def moment(self, rank: int, text: str) -> None:
        super().moment(rank, text)
        self.texts.setdefault(rank, []).append(text)


def numbered_attempt(number: int) -> AbstractContextManager[object]:
    """Within it equal saves write equal files, so that most directories need to be looked at only once."""
    return patch("megackpt.engine.saving.preparation.new_attempt", return_value=f"{number:016x}")


def run_save(
    machine: CrashMachine, value: int, *, ranks: int, strategy: Strategy, options: SaveOptions | None = None
) -> None:
    """Save on a number of ranks, whatever becomes of it."""
    with suppress(Stopped), numbered_attempt(value):
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


def stop_at_every_moment(
    tally: Tally,
    before: Files,
    ranks: int,
    losses: tuple[Loss, ...],
    *,
    only_this_rank: bool = False,
    options: SaveOptions | None = None,
) -> tuple[set[int | None], CrashMachine]:
    """Stop saves of 2; return the values that are there afterwards, and a machine that was not stopped."""
    outcomes: set[int | None] = set()
    for rank in range(ranks):
        for index in range(10_000):
            stop = Moment(rank=rank, index=index, only_this_rank=only_this_rank)
            machine = CrashMachine(before, stop_at=stop)
            run_save(machine, 2, ranks=ranks, strategy=tally.strategy, options=options)
            seen = {tally.look(machine.restarted(loss).disk.files_after(Loss.NOTHING)) for loss in losses}
            outcomes |= seen
            if not machine.has_stopped:  # all of the save's moments have been seen
                assert seen == {2}
                break
        assert index >= (8 if options is None else 9)
    return outcomes, machine


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
    outcomes, _ = stop_at_every_moment(tally, before, ranks, losses, only_this_rank=only_this_rank)
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
    outcomes, machine = stop_at_every_moment(tally, before, ranks, tuple(Loss), options=parity)
    assert outcomes == {1, 2}
    left = machine.disk.files_after(Loss.NOTHING)
    assert sum(name.startswith("parity/") for name in left) == ranks


def saved_with_parity() -> Files:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        data = torch.full((2, 3), group.rank + 1.0)
        rows = ShardedTensor.from_rank_offsets("rows", data, (0, group.rank, 3))
        save({"rows": rows}, store, options=SaveOptions(parity=3), group=group)

    SimulatedWorld(3).run(save_rank)
    return contents(store)


def loaded_rows(files: Files, *copies: MemoryStore) -> list[float]:
    asked = ShardedTensor.from_rank_offsets("rows", torch.zeros(6, 3))
    options = LoadOptions(on_corrupt="fallback", copies=copies)
    rows: list[float] = load({"rows": asked}, MemoryStore(files=files), options=options)["rows"].tolist()
    return rows


def test_a_crash_at_any_moment_of_a_repair_makes_nothing_worse() -> None:
    whole = saved_with_parity()
    first, second, _ = sorted(name for name in whole if name.startswith("data/"))
    damaged = dict(whole)
    del damaged[first]
    # The commit is damaged as well, and comes from a copy with a data file that parity cannot compute alone.
    manifest = whole["metadata.json"].replace(b"xxh3", b"xxh4")
    damaged |= {second: whole[second][:-1], "metadata.json": manifest}
    copy = MemoryStore("copy:", files={name: data for name, data in whole.items() if name != first})
    looked_at: set[frozenset[tuple[str, bytes]]] = set()
    for index in range(10_000):
        machine = CrashMachine(damaged, stop_at=Moment(rank=0, index=index))
        with suppress(Stopped):
            repair(machine.store(rank=0), [copy], threads=1)
        for loss in Loss:
            left = machine.restarted(loss).disk.files_after(Loss.NOTHING)
            seen = frozenset((re.sub("[0-9a-f]{16}.tmp", "tmp", name), data) for name, data in left.items())
            if seen in looked_at:
                continue
            looked_at.add(seen)
            for name, data in whole.items():
                assert left.get(name) in (data, damaged.get(name)), (index, loss, name)
            assert loaded_rows(left, MemoryStore("whole:", files=whole)) == loaded_rows(whole)
            again = MemoryStore(files=left)
            assert repair(again, [copy], threads=1).is_whole
            assert {n: d for n, d in contents(again).items() if not n.endswith(".tmp")} == whole
        if not machine.has_stopped:
            assert left == whole
            break
    assert index > 10


_KILLED = """
import os, sys
import megackpt
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
source, target, count, file_bytes, buffer_bytes = sys.argv[1:]
store = FaultyStore(LocalStore(target), fail_at=int(count), hook=lambda operation: os._exit(9))
megackpt.export_huggingface(
    source, store, max_file_bytes=int(file_bytes), buffer_bytes=int(buffer_bytes), workers=2
)
"""


def test_a_killed_process_leaves_no_half_model(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 2)
    counted = FaultyStore(LocalStore(str(tmp_path / "whole")))
    export(tmp_path / "saved", counted, workers=2)
    whole = contents(tmp_path / "whole")
    chance = random.Random(0)
    for number, count in enumerate(chance.sample(range(len(counted.operations)), few(3, of=20))):
        target = tmp_path / f"folder{number}"
        arguments = [str(tmp_path / "saved"), str(target), str(count), str(FILE_BYTES), str(BUFFER_BYTES)]
        process = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False, timeout=120)
        assert process.returncode == 9
        if target.exists():
            assert_listed_files_are_whole(contents(target), whole)
        export(tmp_path / "saved", target)
        assert contents(target) == whole, count
