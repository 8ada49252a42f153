"""Print a table: the cost of parity and of compared replicas at a save, and of a fallback at a load.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/bench_integrity.py DIRECTORY [--turns 5]

256 MiB a rank. Options take turns, so that what else the machine does slows all of them equally.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt import LoadOptions, SaveOptions, ShardedTensor, load, save
from megackpt.options import Policy

TENSORS, ROWS = 64, 1 << 20
FALLBACK = LoadOptions(on_corrupt="fallback")
State = dict[str, ShardedTensor]


def shards() -> State:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.rand(TENSORS, ROWS)
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", data[i], (0, rank, ranks)) for i in range(TENSORS)
    }


def copies() -> State:
    data = torch.arange(TENSORS * ROWS, dtype=torch.float32).view(TENSORS, ROWS)
    rank = dist.get_rank()
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", data[i], replica_id=rank) for i in range(TENSORS)
    }


class Times:
    """Seconds of each case, from a barrier to a barrier."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def take(self, case: str, work: Callable[[], object]) -> None:
        def collective() -> None:
            work()
            dist.barrier()

        dist.barrier()
        self.take_separately(case, collective)

    def take_separately(self, case: str, work: Callable[[], object]) -> None:
        """Without the barriers, for what one rank does."""
        began = time.perf_counter()
        work()
        self._seconds.setdefault(case, []).append(time.perf_counter() - began)

    def show(self) -> None:
        for case, seconds in self._seconds.items():
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            print(f"{case:28} median {median:6.3f} s, {low:.3f} to {high:.3f}")


def emptied(location: Path) -> Path:
    if dist.get_rank() == 0:
        shutil.rmtree(location, ignore_errors=True)
        os.sync()
    dist.barrier()
    return location


def saves(times: Times, location: Path, state: State, turns: int, cases: dict[str, SaveOptions]) -> None:
    for _ in range(turns):
        for case, options in cases.items():
            emptied(location)
            times.take(case, lambda o=options: save(state, location, options=o))  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    location, times = arguments.directory / "bench-integrity", Times()
    logging.disable(logging.WARNING)
    state = shards()
    protected = {f"save, parity={k}": SaveOptions(parity=k) for k in (4, 2)}
    saves(times, location, state, arguments.turns, {"save": SaveOptions()} | protected)
    save(state, emptied(location), options=SaveOptions(parity=4))
    for _ in range(arguments.turns):
        times.take("load", lambda: load(state, location))
        times.take("load, fallback, whole", lambda: load(state, location, options=FALLBACK))
    dist.barrier()
    if dist.get_rank() == 0:
        min((location / "data").iterdir()).unlink()
    dist.barrier()
    for _ in range(arguments.turns):
        times.take("load, fallback, a file lost", lambda: load(state, location, options=FALLBACK))
    compared = {"save of copies, compared": SaveOptions(compare_replicas=Policy.ERROR)}
    saves(times, location, copies(), arguments.turns, {"save of copies": SaveOptions()} | compared)
    emptied(location)
    if dist.get_rank() == 0:
        times.show()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
