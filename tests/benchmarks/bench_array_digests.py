"""What digests of whole arrays cost a save, and save a comparison. Prints tables; asserts nothing.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/bench_array_digests.py DIRECTORY [--turns 5]

256 MiB a rank. Options take turns, so that other work on the machine slows all of them. Rates are those of
one thread of rank 0, in memory, the best of the turns.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megackpt import SaveOptions, ShardedTensor, diff, save, verify
from megackpt.formats.array_digests import ArrayDigester
from megackpt.metadata import DIGEST_BLOCK_BYTES, ArraySpec, ChunkTable
from megackpt.storage import block_digests, open_store
from megackpt.storage.crc64 import Crc64
from tests.benchmarks.bench_integrity import State, Times, emptied, shards

DIGESTED = SaveOptions(array_digests=True)
ARRAYS, ROWS, COLUMNS = 16, 2048, 8192  # 64 MiB of float32 each
MEMORY_BYTES = 64 << 20
PART_BYTES = 1 << 20


def columns() -> State:
    """Each rank a part of the columns of every array; with 4 ranks 256 MiB, in runs of 8 KiB."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.rand(ARRAYS, ROWS, COLUMNS // ranks)
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", data[i], (1, rank, ranks)) for i in range(ARRAYS)
    }


def of_runs(run_nbytes: int) -> ChunkTable:
    """A chunk of 64 MiB, in runs that are a quarter of the rows of their array."""
    rows = MEMORY_BYTES // run_nbytes
    shape = np.array([[rows, run_nbytes]])
    spec = ArraySpec("array", "uint8", (rows, 4 * run_nbytes) if rows > 1 else (1, run_nbytes))
    numel = np.array([MEMORY_BYTES])
    return ChunkTable((spec,), numel * 0, shape * 0, shape, numel * 0, numel, numel)


def rates(turns: int) -> None:
    data = memoryview(np.random.default_rng(0).integers(0, 256, MEMORY_BYTES, dtype=np.uint8).tobytes())
    parts = [data[at : at + PART_BYTES] for at in range(0, MEMORY_BYTES, PART_BYTES)]
    seconds: dict[str, float] = {}
    for _ in range(turns):
        began = time.perf_counter()
        for part in parts:
            block_digests(part, DIGEST_BLOCK_BYTES)
        ended = time.perf_counter()
        case = "xxh3-64 of each 256 KiB"
        seconds[case] = min(seconds.get(case, math.inf), ended - began)
        for run_nbytes in (MEMORY_BYTES, 20 << 10, 4096, 512, 128, 64, 16, 2):
            table = of_runs(run_nbytes)
            began = time.perf_counter()
            chunk = ArrayDigester(table).begin(0)
            assert chunk is not None
            rows = int(table.shape[0, 0])
            for part in parts if rows * run_nbytes == MEMORY_BYTES else [data[: rows * run_nbytes]]:
                chunk.update(part)
            chunk.result()
            taken = time.perf_counter() - began
            case = f"crc64nvme, runs of {run_nbytes} bytes"
            seconds[case] = min(seconds.get(case, math.inf), taken)
    _operations(turns)
    for case, taken in seconds.items():
        print(f"{case:40} {MEMORY_BYTES / taken / 1e9:7.2f} GB/s")


def _operations(turns: int) -> None:
    """Nanoseconds of what digests are put together with."""
    crc, data = Crc64(), memoryview(bytes(8))
    values = np.random.default_rng(0).integers(0, 2**63, (1, 1 << 16)).astype(np.uint64)
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "a call of 8 bytes": (10_000, lambda: [crc.of(data) for _ in range(10_000)]),
        "a shift": (10_000, lambda: [crc.shifted(9, 123_456 + i) for i in range(10_000)]),
        "a run, put together": (values.size, lambda: crc.fold(values, 4096)),
    }
    for case, (count, work) in cases.items():
        best = min(timeit.repeat(work, number=1, repeat=turns))
        print(f"{case:40} {best / count * 1e9:7.0f} ns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    logging.disable(logging.WARNING)
    if dist.get_rank() == 0:
        rates(arguments.turns)
    times = Times()
    locations = [arguments.directory / f"bench-array-digests-{name}" for name in ("a", "b", "c")]
    for name, state in (("rows", shards()), ("columns", columns())):
        for _ in range(arguments.turns):
            for case, options in (("save", SaveOptions()), ("save, digests", DIGESTED)):
                emptied(locations[0])
                times.take(f"{name}: {case}", lambda o=options, s=state: save(s, locations[0], options=o))  # type: ignore[misc]
    for location in locations[:2]:
        save(state, emptied(location), options=DIGESTED)
    if dist.get_rank() == 0:
        first, second = map(open_store, locations[:2])
        for _ in range(arguments.turns):
            for case, read_all in (("diff", False), ("diff --read", True)):
                times.take_alone(case, lambda r=read_all: diff(first, second, read_all=r))  # type: ignore[misc]
    dist.barrier()
    save(state, emptied(locations[2]))
    if dist.get_rank() == 0:
        for _ in range(arguments.turns):
            for case, location in (("verify --deep, digests", locations[0]), ("verify --deep", locations[2])):
                store = open_store(location)
                times.take_alone(
                    case, lambda s=store: verify(s, deep=True)  # type: ignore[misc]
                )  # fmt: skip
        times.show()
    for location in locations:
        emptied(location)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
