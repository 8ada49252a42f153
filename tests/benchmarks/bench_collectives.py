"""What ranks pay to agree, and for a whole small save: time, CPU time and context switches of each rank.

Run by hand: `OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/bench_collectives.py DIRECTORY`.
First ways to find the largest of 31 numbers over gloo, then saves of 200 tensors of 1 KiB that all ranks
hold, ours and DCP's in turn. Times are those of the slowest rank; the rest is the mean of ranks, and rank 0.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.cli.benchmark.contenders import native
from megackpt.cli.benchmark.state import GridLayout, make_state
from tests.benchmarks.measuring import as_rank, options
from tests.benchmarks.peers.dcp import TorchDistributed
from tests.benchmarks.peers.states import make_small_model

WORDS = 31
COLLECTIVES = 100


def spent() -> list[float]:
    """Return seconds of CPU time, and voluntary context switches, of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [used.ru_utime + used.ru_stime, used.ru_nvcsw]


def measured(work: Callable[[], object], times: int) -> torch.Tensor:
    """Return wall seconds, CPU seconds and switches of each rank for one of several runs, `[ranks, 3]`."""
    dist.barrier()
    before, began = spent(), time.perf_counter()
    for _ in range(times):
        work()
    wall = time.perf_counter() - began
    own_times = torch.tensor(
        [wall, *(b - a for a, b in zip(before, spent(), strict=True))], dtype=torch.float64
    )
    ranks = [torch.empty_like(own_times) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own_times / times)
    return torch.stack(ranks)


def print_times(name: str, times: torch.Tensor) -> None:
    """Print a line on rank 0; found is `[ranks, 3]`."""
    if dist.get_rank() == 0:
        wall, (cpu, switches), first = times[:, 0].max(), times[:, 1:].mean(0), times[0, 1]
        of_processor = f"CPU {1e3 * cpu:6.2f} ms a rank, {1e3 * first:6.2f} ms rank 0"
        print(f"{name:22} {1e3 * wall:8.2f} ms   {of_processor}   {switches:5.1f} switches a rank")


def compare_collectives() -> None:
    """Find the largest numbers in several ways."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numbers = torch.arange(WORDS)
    of_ranks = [torch.empty_like(numbers) for _ in range(size)]
    received, messages = torch.empty(size * WORDS, dtype=torch.int64), numbers.repeat(size)

    def by_root() -> None:
        dist.gather(numbers, of_ranks if rank == 0 else None, dst=0)
        dist.broadcast(numbers, 0)

    ways: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX),
        "all-gather": lambda: dist.all_gather(of_ranks, numbers),
        "gather, broadcast": by_root,
        "each to each": lambda: dist.all_to_all_single(received, messages),
    }
    for name, way in ways.items():
        way()
        print_times(name, measured(way, COLLECTIVES))


def compare_saves(directory: Path, repeats: int) -> None:
    """Save a small state with each library in turn; medians."""
    state = make_state(
        make_small_model(), GridLayout(dp=dist.get_world_size()), dist.get_rank(), torch.float32
    )
    libraries = (native(), TorchDistributed())
    runs: dict[str, list[torch.Tensor]] = {library.name: [] for library in libraries}
    for number in range(repeats + 2):
        for library in libraries:
            location, declared = directory / f"{library.name}-{number}", library.declare(state)
            runs[library.name].append(measured(partial(library.save, declared, location), 1))
            if dist.get_rank() == 0:
                shutil.rmtree(location)
    for name, times in runs.items():
        print_times(f"small save, {name}", torch.stack(times[2:]).median(0).values)


def main() -> None:
    """Measure all."""
    arguments = options(__doc__, "directory", repeats=20)
    with as_rank():
        compare_collectives()
        compare_saves(arguments.directory, arguments.repeats)


if __name__ == "__main__":
    main()
