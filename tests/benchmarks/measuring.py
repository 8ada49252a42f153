"""What several benchmarks share: their options, turns and clocks, a file of random bytes, and processes."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist

MIB, GIB = 1 << 20, 1 << 30


def options(
    text: str | None, *positional: str | tuple[str, Iterable[str]], **flags: Any
) -> argparse.Namespace:
    """Parse the command line: paths, or one of some words; and flags of a type or a default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    for argument in positional:
        if isinstance(argument, str):
            parser.add_argument(argument, type=Path)
        else:
            parser.add_argument(argument[0], choices=tuple(argument[1]))
    for name, option in flags.items():
        more: dict[str, Any] = {"type": type(option), "default": option}
        if isinstance(option, type):
            more = {"type": option, "required": True}
        elif isinstance(option, dict):
            more = option
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser.parse_args()


def medians(
    ways: Mapping[str, Callable[[], object]],
    turns: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    average: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the median seconds of each; they take turns, after one round that does not count."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if turn:
                spent[name].append(clock() - began)
    return {name: average(seconds) for name, seconds in spent.items()}


class Clock:
    """CPU seconds of this process from one call to the next."""

    def __init__(self) -> None:
        self._at = time.process_time()

    def lap(self) -> float:
        before, self._at = self._at, time.process_time()
        return self._at - before


@contextmanager
def random_file(directory: Path, mib: int) -> Iterator[BinaryIO]:
    """Yield a file of random bytes that are on the disk."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(mib):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        yield cast(BinaryIO, file)


@contextmanager
def scratch(directory: Path, name: str) -> Iterator[Path]:
    """Yield a new directory, which is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=directory))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def in_a_process(program: str, *arguments: object) -> Any:
    """Run a program of Python, and return the JSON document of its last line."""
    command = [sys.executable, "-W", "ignore", program, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr.strip()[-3000:])
    return json.loads(ran.stdout.splitlines()[-1])


@contextmanager
def as_rank() -> Iterator[int]:
    """Take part in the group of the ranks that torchrun started, without warnings; yield the rank."""
    dist.init_process_group("gloo")
    logging.disable(logging.WARNING)
    yield dist.get_rank()
    dist.destroy_process_group()


def emptied(location: Path) -> Path:
    """Return a location that rank 0 has removed. Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(location, ignore_errors=True)
        os.sync()
    dist.barrier()
    return location


class Times:
    """Seconds of each case, from a barrier to a barrier."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def take(self, case: str, work: Callable[[], object]) -> None:
        """Time what all ranks do. Collective."""

        def collective() -> None:
            work()
            dist.barrier()

        dist.barrier()
        self.take_separately(case, collective)

    def take_separately(self, case: str, work: Callable[[], object]) -> None:
        """Time what one rank does, without the barriers."""
        began = time.perf_counter()
        work()
        self._seconds.setdefault(case, []).append(time.perf_counter() - began)

    def show(self) -> None:
        """Print a line for each case."""
        for case, seconds in self._seconds.items():
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            print(f"{case:28} median {median:6.3f} s, {low:.3f} to {high:.3f}")
