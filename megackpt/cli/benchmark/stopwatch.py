"""Times that all ranks agree on, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megackpt.cli.benchmark.report import Row


def timed(work: Callable[[], object]) -> float:
    """Return the seconds from a common start until the slowest rank has done its work. Collective."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return largest(time.perf_counter() - began)


def largest(value: float) -> float:
    """Return the largest over all ranks. Collective."""
    largest_value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest_value, dist.ReduceOp.MAX)
    return float(largest_value)


def total(value: int) -> int:
    """Return the sum over all ranks. Collective."""
    sum_of_ranks = torch.tensor(value)
    dist.all_reduce(sum_of_ranks)
    return int(sum_of_ranks)


def all_true(value: bool) -> bool:
    """Tell whether something is true on all ranks. Collective."""
    return total(int(value)) == dist.get_world_size()


class Results:
    """Gathers runs by case and contender. Runs that do not count are only checked."""

    def __init__(self) -> None:
        self.counts = False
        self._nbytes: dict[tuple[str, str], int] = {}
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._verified: dict[tuple[str, str], bool] = {}
        self._differing: dict[tuple[str, str], str] = {}
        self._unsupported: dict[tuple[str, str], str] = {}
        self._read: dict[tuple[str, str], int] = {}

    def add(
        self, case: str, who: str, seconds: float, nbytes: int, *, read_nbytes: int | None = None
    ) -> None:
        """Note a run; read_nbytes is what it has read from files where that is of interest."""
        self._nbytes[case, who] = nbytes
        if read_nbytes is not None:
            self._read[case, who] = read_nbytes
        runs = self._seconds.setdefault((case, who), [])
        if self.counts:
            runs.append(seconds)

    def mark_unsupported(self, case: str, who: str, reason: str) -> None:
        """Note why there is no run."""
        self._seconds.setdefault((case, who), [])
        self._unsupported[case, who] = reason

    def verify(self, cases: tuple[str, ...], who: str, difference: str | None) -> None:
        """Note whether what runs have loaded is right: difference is a key that is not. Collective."""
        parts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, difference)
        differing = [part for part in parts if part is not None]
        for case in cases:
            self._verified[case, who] = self._verified.get((case, who), True) and not differing
            if differing:
                self._seconds.setdefault((case, who), [])  # a row, also where nothing is timed
                self._differing[case, who] = differing[0]

    def rows(self) -> list[Row]:
        """Return a row for everything noted, by case and contender in order of appearance."""
        cases = list(dict.fromkeys(case for case, _ in self._seconds))
        names = list(dict.fromkeys(who for _, who in self._seconds))
        ordered = sorted(self._seconds, key=lambda name: (cases.index(name[0]), names.index(name[1])))
        return [
            Row(
                case=name[0],
                who=name[1],
                nbytes=self._nbytes.get(name, 0),
                seconds=tuple(self._seconds[name]),
                verified=self._verified.get(name),
                differing=self._differing.get(name),
                unsupported=self._unsupported.get(name),
                read_nbytes=self._read.get(name),
            )
            for name in ordered
        ]
