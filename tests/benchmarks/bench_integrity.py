"""Print a table: the cost of parity and of compared replicas at a save, and of a fallback at a load.

Then print the share of a save's processor time that samples of copies take, with the plan of an earlier save.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/bench_integrity.py DIRECTORY [--turns 5]

256 MiB a rank. Options take turns, so that what else the machine does slows all of them equally.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megackpt import LoadOptions, SaveOptions, ShardedTensor, load, save
from megackpt.options import Policy
from megackpt.run import PlanCache
from tests.benchmarks.measuring import Times, as_rank, emptied, options

TENSORS, ROWS = 64, 1 << 20
FALLBACK = LoadOptions(on_corrupt="fallback")
State = dict[str, ShardedTensor]


def declared(data: torch.Tensor, *offsets: tuple[int, int, int], **more: Any) -> State:
    """Return the arrays `data[i]`; every rank has a part or a replica of each."""
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", part, *offsets, **more)
        for i, part in enumerate(data)
    }


def shards() -> State:
    return declared(torch.rand(TENSORS, ROWS), (0, dist.get_rank(), dist.get_world_size()))


def copies() -> State:
    data = torch.arange(TENSORS * ROWS, dtype=torch.float32).view(TENSORS, ROWS)
    return declared(data, replica_id=dist.get_rank())


def saves(times: Times, location: Path, state: State, turns: int, cases: dict[str, SaveOptions]) -> None:
    for _ in range(turns):
        for case, how in cases.items():
            emptied(location)
            times.take(case, partial(save, state, location, options=how))


def share_of_samples(location: Path, nbytes: int, turns: int) -> float:
    """Return what samples add to the processor time of a save of 128 copied tensors of nbytes each."""
    state = declared(torch.ones(128, nbytes // 4), replica_id=dist.get_rank())
    plans = {policy: PlanCache() for policy in (Policy.IGNORE, Policy.WARN)}
    spent: dict[Policy, list[float]] = {policy: [] for policy in plans}
    for _ in range(turns + 1):
        for policy, cache in plans.items():
            emptied(location)
            began = time.process_time()
            save(state, location, options=SaveOptions(sample_replicas=policy), plans=cache)
            spent[policy].append(time.process_time() - began)
    without, with_samples = (median(seconds[1:]) for seconds in spent.values())
    return with_samples / without - 1


def main() -> None:
    arguments = options(__doc__, "directory", turns=5)
    location, times = arguments.directory / "bench-integrity", Times()
    with as_rank() as rank:
        state = shards()
        protected = {f"save, parity={k}": SaveOptions(parity=k) for k in (4, 2)}
        saves(times, location, state, arguments.turns, {"save": SaveOptions()} | protected)
        save(state, emptied(location), options=SaveOptions(parity=4))
        for _ in range(arguments.turns):
            times.take("load", lambda: load(state, location))
            times.take("load, fallback, whole", lambda: load(state, location, options=FALLBACK))
        dist.barrier()
        if rank == 0:
            min((location / "data").iterdir()).unlink()
        dist.barrier()
        for _ in range(arguments.turns):
            times.take("load, fallback, a file lost", lambda: load(state, location, options=FALLBACK))
        compared = {"save of copies, compared": SaveOptions(compare_replicas=Policy.ERROR)}
        saves(times, location, copies(), arguments.turns, {"save of copies": SaveOptions()} | compared)
        shares = {kib: share_of_samples(location, kib << 10, 8 * arguments.turns) for kib in (64, 1024, 8192)}
        emptied(location)
        if rank == 0:
            times.show()
            for kib, share in shares.items():
                print(f"samples of tensors of {kib} KiB: {share:.1%} of a save's processor time")


if __name__ == "__main__":
    main()
