"""Saves, and loads at the layout of the save: cold where files can be taken out of memory, and warm."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.cli.benchmark.contender import Contender
from megackpt.cli.benchmark.measure import BenchRun
from megackpt.cli.benchmark.names import LOAD_COLD, LOAD_WARM, RAW, SAVE
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.state import GridLayout, RankState, fingerprints

NOTHING_IS_COLD = "the file system keeps files in memory, so nothing is cold"


def measure_same_layout(run: BenchRun) -> None:
    """Save and load at TP over all ranks. Collective."""
    layout = GridLayout(tp=run.ranks)
    source, target = run.state(layout), run.state(layout, filled=False)
    expected = fingerprints(source)
    raw = run.raw_files()
    for contender in run.turns([None, *run.everyone]):
        if contender is None:
            _raw(run, raw)
        else:
            _round_trip(run, contender, source, target, expected)
        run.clear()  # one checkpoint at a time: files in memory are memory


def _round_trip(
    run: BenchRun, contender: Contender, source: RankState, target: RankState, expected: Sequence[str]
) -> None:
    seconds = run.save(contender, source)
    run.results.add(SAVE, contender.name, seconds, run.nbytes)
    if run.drop(run.directory(contender.name)):
        run.load(contender, target, expected, LOAD_COLD)
    else:
        run.results.mark_unsupported(LOAD_COLD, contender.name, NOTHING_IS_COLD)
    run.warm(contender.name)
    run.load(contender, target, expected, LOAD_WARM, saved=SAVE)


def _raw(run: BenchRun, raw: RawFiles) -> None:
    for is_direct in (True, False):
        run.time_raw(SAVE, raw.nbytes, lambda direct: raw.write(direct=direct), is_direct=is_direct)
    if run.drop_raw():
        for is_direct in (True, False):  # the direct one leaves files cold
            run.time_raw(LOAD_COLD, raw.nbytes, lambda direct: raw.read(direct=direct), is_direct=is_direct)
    else:
        for who in RAW:
            run.results.mark_unsupported(LOAD_COLD, who, NOTHING_IS_COLD)
    raw.read(direct=False)
    run.time_raw(
        LOAD_WARM, raw.nbytes, lambda direct: raw.read(direct=direct, is_cached=True), is_direct=False
    )
