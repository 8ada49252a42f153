"""Half of each row of a matrix on a disk: read with the other halves, or without them.

Run by hand: `python tests/benchmarks/bench_cold_rows.py --dir DIRECTORY [--mib 1024]`, where the directory's
file system has direct I/O. Wall time of 4 threads, medians of 5 turns, compared with a plain read of as
many bytes as are needed, in parts of 4 MiB: 1.00 is as fast. Nothing is copied or checked, so this is the
disk alone.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.benchmarks.measuring import MIB, medians, options, random_file

ALIGNMENT = 4096  # of direct I/O
THREADS = 4
PART = 4 * MIB
TURNS = 5

Request = tuple[int, int]
"""First byte, and how many."""


def main() -> None:
    """Print the table."""
    args = options(__doc__, dir=Path, mib=1024)
    nbytes = args.mib * MIB
    with random_file(args.dir, args.mib) as file, ThreadPoolExecutor(THREADS) as pool:
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        print(f"{'row, KiB':>10} {'whole rows':>12} {'each half by itself':>20} {'read per byte':>14}")
        for row_nbytes in (5 << 10, 20 << 10, 64 << 10, 256 << 10, 1 << 20):
            parts = _halves(nbytes // row_nbytes, row_nbytes)
            ways = {"plain": _parts(nbytes // 2), "whole": _parts(nbytes), "halves": parts}
            seconds = medians(
                {way: partial(_read, pool, descriptor, requests) for way, requests in ways.items()}, TURNS
            )
            whole, apart = (seconds["plain"] / seconds[way] for way in ("whole", "halves"))
            over = sum(count for _, count in parts) / (nbytes // 2)
            print(f"{row_nbytes >> 10:10} {whole:12.2f} {apart:20.2f} {over:14.2f}", flush=True)
        os.close(descriptor)


def _parts(nbytes: int) -> list[Request]:
    return [(at, min(PART, nbytes - at)) for at in range(0, nbytes, PART)]


def _halves(rows: int, row_nbytes: int) -> list[Request]:
    """What direct I/O has to read for the left half of each row."""
    requests = []
    for row in range(rows):
        low = row * row_nbytes // ALIGNMENT * ALIGNMENT
        high = -(-(row * row_nbytes + row_nbytes // 2) // ALIGNMENT) * ALIGNMENT
        requests.append((low, high - low))
    return requests


def _read(pool: ThreadPoolExecutor, descriptor: int, requests: Sequence[Request]) -> None:
    list(pool.map(partial(_read_share, descriptor), [requests[share::THREADS] for share in range(THREADS)]))


def _read_share(descriptor: int, requests: Sequence[Request]) -> None:
    buffer = memoryview(mmap.mmap(-1, PART))
    for at, count in requests:
        os.preadv(descriptor, [buffer[:count]], at)


if __name__ == "__main__":
    main()
