"""What digests of whole arrays cost a save, and save a comparison. Prints tables; asserts nothing.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/bench_array_digests.py DIRECTORY [--turns 5]

256 MiB a rank. Options take turns, so that other work on the machine slows all of them. Rates are those of
one thread of rank 0, in memory, the best of the turns.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megackpt import SaveOptions, diff, save, verify
from megackpt.formats.array_digests import ArrayDigester
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, ArraySpec, ChunkTable
from megackpt.storage import block_digests, open_store
from megackpt.storage.crc64 import Crc64
from tests.benchmarks.bench_integrity import State, declared, saves, shards
from tests.benchmarks.measuring import Times, as_rank, emptied, medians, options

DIGESTED = SaveOptions(array_digests=True)
ARRAYS, ROWS, COLUMNS = 16, 2048, 8192  # 64 MiB of float32 each
MEMORY_BYTES = 64 << 20
PART_BYTES = 1 << 20


def columns() -> State:
    """Each rank a part of the columns of every array; with 4 ranks 256 MiB, in runs of 8 KiB."""
    ranks = dist.get_world_size()
    return declared(torch.rand(ARRAYS, ROWS, COLUMNS // ranks), (1, dist.get_rank(), ranks))


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

    def blocks() -> None:
        for part in parts:
            block_digests(part, DIGEST_BLOCK_BYTES)

    def runs(table: ChunkTable) -> None:
        chunk = ArrayDigester(table).begin(0)
        assert chunk is not None
        nbytes = int(table.shape[0].prod())
        for part in parts if nbytes == MEMORY_BYTES else [data[:nbytes]]:
            chunk.update(part)
        chunk.result()

    ways = {"xxh3-64 of each 256 KiB": blocks}
    for run_nbytes in (MEMORY_BYTES, 20 << 10, 4096, 512, 128, 64, 16, 2):
        ways[f"crc64nvme, runs of {run_nbytes} bytes"] = partial(runs, of_runs(run_nbytes))
    seconds = medians(ways, turns, average=min)
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
    arguments = options(__doc__, "directory", turns=5)
    times = Times()
    locations = [arguments.directory / f"bench-array-digests-{name}" for name in ("a", "b", "c")]
    with as_rank() as rank:
        if rank == 0:
            rates(arguments.turns)
        for name, state in (("rows", shards()), ("columns", columns())):
            cases = {f"{name}: save": SaveOptions(), f"{name}: save, digests": DIGESTED}
            saves(times, locations[0], state, arguments.turns, cases)
        for location, how in zip(locations, (DIGESTED, DIGESTED, SaveOptions()), strict=True):
            save(state, emptied(location), options=how)
        if rank == 0:
            first, second, plain = map(open_store, locations)
            checks = {
                "diff": lambda: diff(first, second),
                "diff --read": lambda: diff(first, second, read_all=True),
                "verify --deep, digests": lambda: verify(first, deep=True),
                "verify --deep": lambda: verify(plain, deep=True),
            }
            for _ in range(arguments.turns):
                for case, check in checks.items():
                    times.take_separately(case, check)
            times.show()
        for location in locations:
            emptied(location)


if __name__ == "__main__":
    main()
