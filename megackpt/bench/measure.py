"""What all cases share: the ranks' state, the contenders, their turns, their directories.

Owns the order of runs. A run of every contender that does not count comes first; then contenders take turns,
each time beginning with another, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megackpt.bench import counters, page_cache
from megackpt.bench.contender import Contender
from megackpt.bench.names import RAW_BUFFERED, RAW_DIRECT
from megackpt.bench.ours import native, other_formats
from megackpt.bench.peers import make_peer
from megackpt.bench.raw import RawFiles
from megackpt.bench.settings import BenchSettings
from megackpt.bench.state import (
    GridLayout,
    RankState,
    first_difference,
    make_model,
    make_state,
    spoil,
    state_nbytes,
)
from megackpt.bench.stopwatch import Results, all_true, timed, total

T = TypeVar("T")
_FORMAT_ROUNDS = 2
_RAW = "raw"  # name of the directory of plain files


class Measuring:
    """One rank's part in a run of the benchmark. Every method but `state` and `directory` is collective.

    Attributes:
        native: our own format with default options.
        peers: those to compare with.
        formats: our other formats; they take part in plain saves and loads and in resharded loads.
        leaders: the native format and the peers.
        everyone: all of them.
        has_cold_files: whether files can be taken out of memory.
    """

    def __init__(self, settings: BenchSettings, root: Path) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.settings, self.root = settings, root
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.model = make_model(settings.size, ranks=self.ranks, dtype=self.dtype)
        self.nbytes = state_nbytes(self.model, self.dtype)
        self.native = native()
        self.formats: list[Contender] = list(other_formats(settings.formats))
        self.peers: list[Contender] = [make_peer(name) for name in settings.peers]
        self.leaders: list[Contender] = [self.native, *self.peers]
        self.everyone: list[Contender] = [self.native, *self.formats, *self.peers]
        self.results = Results()
        self.has_cold_files = self._has_cold_files()

    def state(self, layout: GridLayout, *, filled: bool = True) -> RankState:
        """Return this rank's part of the state at a layout."""
        return make_state(self.model, layout, self.rank, self.dtype, filled=filled)

    def turns(
        self, contenders: Sequence[T], *, rounds: int | None = None, peer_rounds: int | None = None
    ) -> Iterator[T]:
        """Give each contender its turns; the first of each does not count.

        By default there are as many rounds as the settings say. Our other formats take part in two of them at
        most, peers in peer_rounds where that is given: they are slow, and the first are as good as the last.
        """
        rounds = rounds or self.settings.repeats
        most = {id(one): _FORMAT_ROUNDS for one in self.formats}
        most |= {id(one): peer_rounds or rounds for one in self.peers}
        for turn in range(rounds + 1):
            self.results.counts = turn > 0
            if self.rank == 0 and sys.stderr.isatty():
                sys.stderr.write(f"\rround {turn} of {rounds} \r")
            able = [one for one in contenders if turn <= most.get(id(one), rounds)]
            first = turn % max(1, len(able))
            yield from [*able[first:], *able[:first]]

    def raw_files(self) -> RawFiles:
        """Return files of the size of the state, and memory for them."""
        return RawFiles(self.directory(_RAW), self.nbytes, rank=self.rank, ranks=self.ranks)

    def time_raw(self, case: str, nbytes: int, work: Callable[[bool], None], *, is_direct: bool) -> None:
        """Note a run of raw I/O, or that the system refuses it; nbytes is this rank's share."""
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
            self.results.refuse(case, who, f"{case}: {(failed or ['another rank failed'])[0]}")

    def load(
        self,
        one: Contender,
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
        declared = one.declare(target)
        before = counters.read_bytes()
        seconds = timed(partial(one.load, declared, self.directory(one.name)))
        after = counters.read_bytes()
        read = None if before is None or after is None else total(after - before)
        self.results.add(case, one.name, seconds, total(target.nbytes), read_nbytes=read)
        cases = (case,) if saved is None else (case, saved)
        self.results.verify(cases, one.name, first_difference(target, expected))

    def save(self, one: Contender, source: RankState) -> float:
        """Save into the contender's directory in place of what was there; return the seconds."""
        self.fresh(one.name)
        return timed(partial(one.save, one.declare(source), self.directory(one.name)))

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
        """Take the files below a directory out of memory; say whether that was possible."""
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
        found = self.drop(probe)
        self.clear()
        return found
