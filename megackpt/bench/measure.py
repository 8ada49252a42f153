"""What one rank does: all cases, contenders in turn.

Owns the order. A run of every contender that does not count comes first; then contenders take turns, each
time beginning with another, so that what else the machine does meets all of them.
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

from megackpt.bench import page_cache
from megackpt.bench.contender import Contender
from megackpt.bench.ours import ours
from megackpt.bench.raw import RawFile
from megackpt.bench.report import RAW_NAME, Row
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


class Measuring:
    """One rank's part in a run of the benchmark. Every method is collective."""

    def __init__(self, settings: BenchSettings, root: Path) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.settings, self.root = settings, root
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.model = make_model(settings.size, ranks=self.ranks, dtype=self.dtype)
        self.nbytes = state_nbytes(self.model, self.dtype)
        self.contenders = [*ours(), *map(make_peer, settings.peers)]
        self.results = Results()

    def run(self) -> list[Row]:
        """Measure everything."""
        split = GridLayout(tp=self.ranks)
        half = self.ranks // 2
        self._save_and_load(split, GridLayout(tp=half, dp=2) if half else None)
        if half:
            self._reshard(GridLayout(pp=self.ranks), GridLayout(pp=half, tp=2))
            flat = GridLayout(dp=self.ranks, is_flat=True)
            self._reshard(flat, GridLayout(tp=2, dp=half, is_flat=True))
        self._save_behind(split)
        return self.results.rows()

    def state(self, layout: GridLayout, *, filled: bool = True) -> RankState:
        """Return this rank's part of the state at a layout."""
        return make_state(self.model, layout, self.rank, self.dtype, filled=filled)

    def _save_and_load(self, layout: GridLayout, other: GridLayout | None) -> None:
        """Cases `save`, `load` and, from the same checkpoints, the change of TP."""
        source, target = self.state(layout), self.state(layout, filled=False)
        expected, resharded = (
            (self.state(other), self.state(other, filled=False)) if other else (source, target)
        )
        case = f"{layout} to {other}"
        raw = RawFile(self.root / f"raw-{self.rank}", source.nbytes)
        for one in self._turns([None, *self.contenders]):
            if one is None:
                self._raw(raw)
                continue
            with_directory = partial(self._in_directory, one.name)
            with_directory(partial(self._round_trip, one, source, target))
            if other is None:
                continue
            reason = one.refusal(layout, other)
            if reason is not None:
                self.results.refuse(case, one.name, reason)
                continue
            self._load(one, self._directory(one.name), resharded, expected, case)
        self._clear()

    def _round_trip(self, one: Contender, source: RankState, target: RankState, directory: Path) -> None:
        seconds = timed(partial(one.save, one.declare(source), directory))
        self.results.add("save", one.name, seconds, self.nbytes)
        if self._drop(directory):
            self._load(one, directory, target, source, "load, cold")
        else:
            reason = "the file system keeps files in memory, so nothing is cold"
            self.results.refuse("load, cold", one.name, reason)
        self._load(one, directory, target, source, "load, warm", saved="save")

    def _reshard(self, saved_at: GridLayout, loaded_at: GridLayout) -> None:
        """A load at another layout, warm; every contender saves once."""
        kind = "flat optimizer, " if saved_at.is_flat else ""
        case = f"{kind}{saved_at} to {loaded_at}"
        able = []
        source = self.state(saved_at)
        for one in self.contenders:
            reason = one.refusal(saved_at, loaded_at)
            if reason is not None:
                self.results.refuse(case, one.name, reason)
                continue
            able.append(one)
            self._in_directory(one.name, partial(one.save, one.declare(source)))
        del source
        expected, target = self.state(loaded_at), self.state(loaded_at, filled=False)
        for one in self._turns(able):
            self._load(one, self._directory(one.name), target, expected, case)
        self._clear()

    def _save_behind(self, layout: GridLayout) -> None:
        """How long training waits for an asynchronous save, and when it is done."""
        expected, target = self.state(layout), self.state(layout, filled=False)
        source = self.state(layout)
        able = [one for one in self.contenders if one.name != "torch"]
        for one in self._turns(able):
            self._in_directory(one.name, partial(self._one_behind, one, source, target, expected))
        self._clear()

    def _one_behind(
        self, one: Contender, source: RankState, target: RankState, expected: RankState, directory: Path
    ) -> None:
        waits: list[Callable[[], Path]] = []
        stall = timed(lambda: waits.append(one.save_behind(one.declare(source), directory)))
        spoil(source)  # as training would: what is saved must be a copy
        wait = waits[0]
        written: list[Path] = []
        rest = timed(lambda: written.append(wait()))
        self.results.add("async, stall", one.name, stall, self.nbytes)
        self.results.add("async, total", one.name, stall + rest, self.nbytes)
        for piece, right in zip(source.pieces, expected.pieces, strict=True):
            piece.data.copy_(right.data)
        spoil(target)
        one.load(one.declare(target), written[0])
        difference = first_difference(target, expected)
        self.results.verify(("async, stall", "async, total"), one.name, difference)

    def _load(
        self,
        one: Contender,
        directory: Path,
        target: RankState,
        expected: RankState,
        case: str,
        *,
        saved: str | None = None,
    ) -> None:
        spoil(target)
        seconds = timed(partial(one.load, one.declare(target), directory))
        self.results.add(case, one.name, seconds, total(target.nbytes))
        cases = (case,) if saved is None else (case, saved)
        self.results.verify(cases, one.name, first_difference(target, expected))

    def _raw(self, raw: RawFile) -> None:
        nbytes = total(raw.nbytes)

        def note(case: str, work: Callable[[], None]) -> None:
            failed: list[str] = []

            def attempt() -> None:
                try:
                    work()
                except OSError as error:
                    failed.append(str(error))

            seconds = timed(attempt)
            if all_true(not failed):
                self.results.add(case, RAW_NAME, seconds, nbytes)
            else:
                self.results.refuse(case, RAW_NAME, f"{case}: {(failed or ['another rank failed'])[0]}")

        note("write, direct", partial(raw.write, direct=True))
        note("write, buffered", partial(raw.write, direct=False))
        note("read, direct", partial(raw.read, direct=True))
        if self._drop(self.root):
            note("read, cold", partial(raw.read, direct=False))
        else:
            self.results.refuse("read, cold", RAW_NAME, "read, cold: nothing is cold on this file system")
        raw.read(direct=False)
        note("read, warm", partial(raw.read, direct=False))
        raw.path.unlink()

    def _turns(self, contenders: Sequence[T]) -> Iterator[T]:
        """Give each contender its turns; the first of each does not count."""
        for turn in range(self.settings.repeats + 1):
            self.results.counts = turn > 0
            if self.rank == 0 and sys.stderr.isatty():
                sys.stderr.write(f"\rround {turn} of {self.settings.repeats} \r")
            first = turn % max(1, len(contenders))
            yield from [*contenders[first:], *contenders[:first]]

    def _in_directory(self, name: str, work: Callable[[Path], object]) -> None:
        """Do something in a directory that was just made, in place of one of that name."""
        directory = self._directory(name)
        if self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        dist.barrier()
        work(directory)

    def _directory(self, name: str) -> Path:
        return self.root / name.replace(":", "-")

    def _drop(self, directory: Path) -> bool:
        dist.barrier()
        dropped = self.rank != 0 or page_cache.drop(directory)
        return all_true(dropped)

    def _clear(self) -> None:
        dist.barrier()
        if self.rank == 0:
            for entry in self.root.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
        dist.barrier()


def make_peer(name: str) -> Contender:
    """Return the contender of a name of PEERS.

    Raises:
        MissingExtraError: its library is not installed.
    """
    if name == "dcp":
        from megackpt.bench.dcp import TorchDistributed

        return TorchDistributed()
    if name == "mcore":
        from megackpt.bench.megatron import MegatronCore

        return MegatronCore()
    from megackpt.bench.plain_torch import PlainTorch

    return PlainTorch()
