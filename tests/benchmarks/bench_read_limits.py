"""What a byte of a warm load costs by each possible way, compared with a plain read of the needed bytes.

Run by hand: `python tests/benchmarks/bench_read_limits.py --dir DIRECTORY [--mib 128]`. CPU time of one
thread, in the page cache (or on /dev/shm), medians of 7 turns; 1.00 is a plain read of the needed bytes in
parts of 4 MiB. The first table is of bytes that are contiguous on both sides, the others are of the left
half of the columns of a matrix that was stored whole.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tests.benchmarks.measuring import MIB, medians, options, random_file

BLOCK = 256 << 10  # under one digest
PART = 15 * BLOCK  # the longest read of a load
REPEATS = 7
ROWS_AT_ONCE = 500  # a request to the system has at most 1024 parts
Bytes = npt.NDArray[np.uint8]


def main() -> None:
    """Print the tables."""
    args = options(__doc__, dir=Path, mib=128)
    nbytes = args.mib * MIB
    with random_file(args.dir, args.mib) as file:
        _print(f"{args.mib} MiB, contiguous", contiguous(file.fileno(), nbytes))
        for row_nbytes in (5 << 10, 20 << 10, 64 << 10, 1 << 20):
            _print(f"half of rows of {row_nbytes >> 10} KiB", half_rows(file.fileno(), nbytes, row_nbytes))


def contiguous(descriptor: int, nbytes: int) -> dict[str, Callable[[], None]]:
    """Ways of bytes that lie in a row in the file and in the tensor."""
    target, buffer = _memory(nbytes), _memory(PART)

    def straight(*, check: bool) -> None:
        for at in range(0, nbytes, PART):
            share = target.data[at : at + PART]
            os.preadv(descriptor, [share], at)
            if check:
                _check(share)

    def through_buffer() -> None:
        for at in range(0, nbytes, PART):
            share = buffer[: min(PART, nbytes - at)]
            os.preadv(descriptor, [share.data], at)
            _check(share.data)
            np.copyto(target[at : at + len(share)], share)

    return {
        "plain read": lambda: straight(check=False),
        "straight, digests": lambda: straight(check=True),
        "buffer, digests, copy": through_buffer,
    }


def half_rows(descriptor: int, nbytes: int, row_nbytes: int) -> dict[str, Callable[[], None]]:
    """Ways of the left half of each row."""
    half, rows = row_nbytes // 2, nbytes // row_nbytes
    target, buffer, others = _memory(rows * half), _memory(PART), _memory(ROWS_AT_ONCE * half)
    matrix, at_once = target.reshape(rows, half), max(1, PART // row_nbytes)

    def plain() -> None:
        for at in range(0, rows * half, 4 << 20):
            os.preadv(descriptor, [target.data[at : at + (4 << 20)]], at)

    def through_buffer(*, check: bool) -> None:
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            share = buffer[: count * row_nbytes]
            os.preadv(descriptor, [share.data], first * row_nbytes)
            if check:
                _check(share.data)
            np.copyto(matrix[first : first + count], share.reshape(count, row_nbytes)[:, :half])

    def one_by_one() -> None:
        for row in range(rows):
            os.preadv(descriptor, [target.data[row * half : (row + 1) * half]], row * row_nbytes)

    def scattered(*, check: bool) -> None:
        digest = xxhash.xxh3_64()
        for first in range(0, rows, ROWS_AT_ONCE):
            parts: list[memoryview] = []
            for row in range(first, min(first + ROWS_AT_ONCE, rows)):
                other = (row - first) * half if check else 0
                parts += [target.data[row * half : (row + 1) * half], others.data[other : other + half]]
            os.preadv(descriptor, parts, first * row_nbytes)
            for part in parts if check else ():
                digest.update(part)

    return {
        "plain read": plain,
        "whole rows to a buffer, digests, copy": lambda: through_buffer(check=True),
        "whole rows to a buffer, copy": lambda: through_buffer(check=False),
        "one request a row": one_by_one,
        "scattered by the system, gaps elsewhere": lambda: scattered(check=False),
        "scattered by the system, digests over the parts": lambda: scattered(check=True),
    }


def _check(data: memoryview) -> None:
    for at in range(0, len(data), BLOCK):
        xxhash.xxh3_64_intdigest(data[at : at + BLOCK])


def _memory(nbytes: int) -> Bytes:
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = 1
    return memory


def _print(title: str, ways: Mapping[str, Callable[[], None]]) -> None:
    seconds_of = medians(ways, REPEATS, clock=time.thread_time)
    plain = seconds_of["plain read"]
    print(title)
    for name, seconds in seconds_of.items():
        print(f"  {name:50} {plain / seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
