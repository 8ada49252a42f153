"""One rank's part in a benchmark: its state, the libraries that are compared, their turns and directories.

A run of every library that does not count comes first. Then the libraries take turns, and another one
begins each round, so that other work on the machine slows all of them down equally.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist

from megackpt.cli.benchmark import page_cache
from megackpt.cli.benchmark.contenders import Contender, native, other_formats
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.report import RAW_BUFFERED, RAW_DIRECT, Row
from megackpt.cli.benchmark.settings import BenchSettings
from megackpt.cli.benchmark.state import (
    GridLayout,
    RankState,
    first_difference,
    make_model,
    make_state,
    spoil,
    state_nbytes,
)

# Times that all ranks agree on, and what came of them.


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


# Lines on stderr that show how far a benchmark is. On a terminal, each replaces the one before.

_CLEAR = "\r\x1b[K"  # to the beginning of the line, and erase it


class BenchProgress:
    """What is measured now, the time spent, and an estimate of the time left.

    The estimate takes every case as equally long.
    """

    def __init__(self, stream: TextIO | None, cases: int) -> None:
        """Take where to write, or None to write nothing, and the number of cases."""
        self._stream, self._cases = stream, cases
        self._is_terminal = stream is not None and stream.isatty()
        self._case, self._number = "", 0
        self._part, self._parts = 0, 1
        self._began = time.perf_counter()

    def begin(self, case: str) -> None:
        """Show that the next case begins."""
        self._case, self._number = case, self._number + 1
        self._part, self._parts = 0, 1
        self.show("begins", 0.0)

    def begin_part(self, name: str, part: int, parts: int) -> None:
        """Show that one of several parts of the case begins; they are counted from 0."""
        self._part, self._parts = part, parts
        self.show(name, 0.0)

    def show(self, doing: str, share: float) -> None:
        """Show what is done now; share is how much of the case, or of its part, is done, from 0 to 1."""
        if self._stream is None:
            return
        spent = time.perf_counter() - self._began
        done = (max(self._number - 1, 0) + (self._part + share) / self._parts) / self._cases
        left = f", about {_clock(spent / done - spent)} left" if done else ""
        where = f"{self._case} ({self._number} of {self._cases}): " if self._case else ""
        line = f"bench: {where}{doing}, {_clock(spent)} spent{left}"
        self._stream.write(f"{_CLEAR}{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Erase the line of a terminal."""
        if self._stream is not None and self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


T = TypeVar("T")
_FORMAT_ROUNDS = 2
_RAW = "raw"  # name of the directory of plain files


class BenchRun:
    """One rank's part in a benchmark. Every method but `state` and `directory` is collective.

    Attributes:
        native: our own format with default options.
        peers: other libraries to compare with.
        formats: our other formats; they take part in plain saves and loads and in resharded loads.
        everyone: the native format, our other ones, and the peers.
        progress: the lines that show how far rank 0 is.
        has_cold_files: whether files can be taken out of memory.
    """

    def __init__(
        self, settings: BenchSettings, root: Path, *, cases: int, peers: Sequence[Contender] = ()
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.settings, self.root = settings, root
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.model = make_model(settings.size, ranks=self.ranks, dtype=self.dtype)
        self.nbytes = state_nbytes(self.model, self.dtype)
        self.native = native()
        self.formats: list[Contender] = list(other_formats(settings.formats))
        self.peers = peers
        self.everyone: list[Contender] = [self.native, *self.formats, *self.peers]
        self.results = Results()
        is_shown = self.rank == 0 and not settings.quiet
        self.progress = BenchProgress(sys.stderr if is_shown else None, cases)
        self.has_cold_files = self._has_cold_files()

    def state(self, layout: GridLayout, *, filled: bool = True) -> RankState:
        """Return this rank's part of the state at a layout."""
        return make_state(self.model, layout, self.rank, self.dtype, filled=filled)

    def turns(
        self, contenders: Sequence[T], *, rounds: int | None = None, peer_rounds: int | None = None
    ) -> Iterator[T]:
        """Yield each contender once a round. The first round does not count.

        By default there are as many rounds as the settings say. Our other formats take part in at most two
        of them, and peers in `peer_rounds` if it is given: they are slow, and more rounds show nothing new.
        """
        rounds = rounds or self.settings.repeats
        most = {id(contender): _FORMAT_ROUNDS for contender in self.formats}
        most |= {id(contender): peer_rounds or rounds for contender in self.peers}
        for turn in range(rounds + 1):
            self.results.counts = turn > 0
            doing = f"round {turn} of {rounds}" if turn else f"a round that does not count, of {rounds}"
            self.progress.show(doing, turn / (rounds + 1))
            able = [contender for contender in contenders if turn <= most.get(id(contender), rounds)]
            first = turn % max(1, len(able))
            for contender in [*able[first:], *able[:first]]:
                # A full collection takes 0.1 s with torch imported. Do it while no contender is timed.
                gc.collect()
                yield contender

    def raw_files(self) -> RawFiles:
        """Return files of the size of the state, and memory for them."""
        return RawFiles(self.directory(_RAW), self.nbytes, rank=self.rank, ranks=self.ranks)

    def time_raw(self, case: str, nbytes: int, work: Callable[[bool], None], *, is_direct: bool) -> None:
        """Note a run of raw I/O, or that the system does not support it; nbytes is this rank's share."""
        who = RAW_DIRECT if is_direct else RAW_BUFFERED
        failed: list[str] = []

        def attempt() -> None:
            try:
                work(is_direct)
            except OSError as error:
                failed.append(str(error))

        seconds = timed(attempt)
        if all_true(not failed):
            self.results.add(case, who, seconds, total(nbytes))
        else:
            self.results.mark_unsupported(case, who, f"{case}: {(failed or ['another rank failed'])[0]}")

    def load(
        self,
        contender: Contender,
        target: RankState,
        expected: Sequence[str],
        case: str,
        *,
        saved: str | None = None,
    ) -> None:
        """Note a load from the contender's directory, and compare all of it with what is expected.

        saved is the case in which it was saved, whose save is then right or wrong too.
        """
        spoil(target)
        declared = contender.declare(target)
        before = page_cache.read_bytes()
        seconds = timed(partial(contender.load, declared, self.directory(contender.name)))
        after = page_cache.read_bytes()
        read = None if before is None or after is None else total(after - before)
        self.results.add(case, contender.name, seconds, total(target.nbytes), read_nbytes=read)
        cases = (case,) if saved is None else (case, saved)
        self.results.verify(cases, contender.name, first_difference(target, expected))

    def save(self, contender: Contender, source: RankState) -> float:
        """Save into the contender's directory in place of what was there; return the seconds."""
        self.fresh(contender.name)
        return timed(partial(contender.save, contender.declare(source), self.directory(contender.name)))

    def fresh(self, name: str) -> Path:
        """Make an empty directory in place of one of that name."""
        directory = self.directory(name)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        dist.barrier()
        return directory

    def directory(self, name: str) -> Path:
        """Return where the checkpoint of a contender is."""
        return self.root / name.replace(":", "-")

    def drop(self, directory: Path) -> bool:
        """Take the files below a directory out of memory; return whether that was possible."""
        dist.barrier()
        dropped = self.rank != 0 or page_cache.drop(directory)
        return all_true(dropped)

    def drop_raw(self) -> bool:
        """Like `drop`, of the raw files."""
        return self.drop(self.directory(_RAW))

    def warm(self, name: str) -> None:
        """Have the files of a contender's checkpoint in memory, also where it went around the page cache."""
        dist.barrier()
        page_cache.warm(self.directory(name), rank=self.rank, ranks=self.ranks)
        dist.barrier()

    def clear(self) -> None:
        """Remove all checkpoints, and raw files."""
        dist.barrier()
        if self.rank == 0:
            for entry in self.root.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
        dist.barrier()

    def _has_cold_files(self) -> bool:
        probe = self.fresh("probe")
        if self.rank == 0:
            (probe / "file").write_bytes(bytes(1 << 20))
        is_dropped = self.drop(probe)
        self.clear()
        return is_dropped
