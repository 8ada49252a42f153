"""One rank's part in a benchmark: its state, the libraries that are compared, their turns and directories.

A run of every library that does not count comes first. Then the libraries take turns, and another one
begins each round, so that other work on the machine slows all of them down equally.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megackpt.cli.benchmark import page_cache
from megackpt.cli.benchmark.contenders import Contender, native, other_formats
from megackpt.cli.benchmark.progress import BenchProgress
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.report import RAW_BUFFERED, RAW_DIRECT
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
from megackpt.cli.benchmark.stopwatch import Results, all_true, timed, total

T = TypeVar("T")
_FORMAT_ROUNDS = 2
_RAW = "raw"  # name of the directory of plain files


class BenchRun:
    """One rank's part in a benchmark. Every method but `state` and `directory` is collective.

    Attributes:
        native: our own format with default options.
        peers: other libraries to compare with.
        formats: our other formats; they take part in plain saves and loads and in resharded loads.
        leaders: the native format and the peers.
        everyone: all of them.
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
        self.peers = list(peers)
        self.leaders: list[Contender] = [self.native, *self.peers]
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
