"""The machine stops at every moment of a repair: no file is worse then, and the next repair ends it."""

from __future__ import annotations

import re
from contextlib import suppress

import torch

from megackpt import LoadOptions, SaveOptions, ShardedTensor, load, repair, save
from megackpt.comm import Group
from megackpt.storage import MemoryStore
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.world import SimulatedWorld

Files = dict[str, bytes]


def saved() -> Files:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        data = torch.full((2, 3), group.rank + 1.0)
        rows = ShardedTensor.from_rank_offsets("rows", data, (0, group.rank, 3))
        save({"rows": rows}, store, options=SaveOptions(parity=3), group=group)

    SimulatedWorld(3).run(save_rank)
    return contents(store)


def contents(store: MemoryStore) -> Files:
    return {name: store.read(name, max_bytes=1 << 20) for name in store.names()}


def loaded(files: Files, *copies: MemoryStore) -> list[float]:
    asked = ShardedTensor.from_rank_offsets("rows", torch.zeros(6, 3))
    options = LoadOptions(on_corrupt="fallback", copies=copies)
    rows: list[float] = load({"rows": asked}, MemoryStore(files=files), options=options)["rows"].tolist()
    return rows


def test_a_crash_at_any_moment_of_a_repair_makes_nothing_worse() -> None:
    whole = saved()
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
            assert loaded(left, MemoryStore("whole:", files=whole)) == loaded(whole)
            again = MemoryStore(files=left)
            assert repair(again, [copy], threads=1).is_whole
            assert {n: d for n, d in contents(again).items() if not n.endswith(".tmp")} == whole
        if not machine.has_stopped:
            assert left == whole
            break
    assert index > 10
