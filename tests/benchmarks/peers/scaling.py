"""One rank compared with many, for the same state: whether total throughput falls."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megackpt.cli.benchmark.measure import timed
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.report import LOAD_WARM, OURS, SAVE
from megackpt.cli.benchmark.state import (
    GridLayout,
    RankState,
    fingerprints,
    first_difference,
    make_state,
    spoil,
)
from megackpt.comm import Group, SingleProcess
from megackpt.run.collective import load, save
from tests.benchmarks.peers.names import SCALING, scaling_case
from tests.benchmarks.peers.run import PeerRun


def measure_scaling(run: PeerRun) -> None:
    """Save and load with rank 0 alone, while the others wait, and with all ranks. Collective."""
    if run.ranks == 1:
        return
    sides = [_Side(run, ranks) for ranks in (1, run.ranks)]
    for side in run.turns(sides):
        side.write_raw()
        side.round_trip()
        run.clear()
    for case in (SAVE, LOAD_WARM):
        one_rank, many_ranks = (run.row(scaling_case(case, side.ranks), OURS) for side in sides)
        if one_rank.rate and many_ranks.rate:
            name = f"{case}, {SCALING.format(ranks=run.ranks)}"
            run.note(name, OURS, many_ranks.rate / one_rank.rate)


class _Side:
    """The state on so many ranks; the others have nothing, and wait."""

    def __init__(self, run: PeerRun, ranks: int) -> None:
        self.ranks = ranks
        self._run = run
        self._takes_part = run.rank < ranks
        self._group: Group | None = SingleProcess() if ranks == 1 else None
        layout = GridLayout(tp=ranks)
        self._state = (
            make_state(run.model, layout, run.rank, run.dtype)
            if self._takes_part
            else RankState(layout, run.rank)
        )
        self._expected = fingerprints(self._state)
        self._raw = None
        if self._takes_part:
            self._raw = RawFiles(run.directory("raw"), run.nbytes, rank=run.rank, ranks=ranks)

    def write_raw(self) -> None:
        """Write plain files, around the page cache."""

        def write(direct: bool) -> None:
            if self._raw is not None:
                self._raw.write(direct=direct)

        nbytes = self._raw.nbytes if self._raw is not None else 0
        self._run.time_raw(scaling_case(SAVE, self.ranks), nbytes, write, is_direct=True)

    def round_trip(self) -> None:
        """Save, load and compare."""
        results, nbytes = self._run.results, self._run.nbytes
        directory = self._run.fresh(OURS)
        saving = timed(partial(self._save, directory))
        self._run.warm(OURS)
        spoil(self._state)
        loading = timed(partial(self._load, directory))
        cases = (scaling_case(SAVE, self.ranks), scaling_case(LOAD_WARM, self.ranks))
        for case, seconds in zip(cases, (saving, loading), strict=True):
            results.add(case, OURS, seconds, nbytes)
        results.verify(cases, OURS, first_difference(self._state, self._expected))

    def _save(self, directory: Path) -> None:
        if self._takes_part:
            save(self._run.native.declare(self._state), directory, group=self._group)

    def _load(self, directory: Path) -> None:
        if self._takes_part:
            load(self._run.native.declare(self._state), directory, group=self._group)
