"""Saves, and loads at the layout of the save: cold where files can be taken out of memory, and warm."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.bench.contender import Contender
from megackpt.bench.measure import Measuring
from megackpt.bench.names import LOAD_COLD, LOAD_WARM, RAW, SAVE
from megackpt.bench.raw import RawFiles
from megackpt.bench.state import GridLayout, RankState, fingerprints

NOTHING_IS_COLD = "the file system keeps files in memory, so nothing is cold"


def measure_same_layout(measuring: Measuring) -> None:
    """Save and load at TP over all ranks. Collective."""
    layout = GridLayout(tp=measuring.ranks)
    source, target = measuring.state(layout), measuring.state(layout, filled=False)
    expected = fingerprints(source)
    raw = measuring.raw_files()
    for one in measuring.turns([None, *measuring.everyone]):
        if one is None:
            _raw(measuring, raw)
        else:
            _round_trip(measuring, one, source, target, expected)
        measuring.clear()  # one checkpoint at a time: files in memory are memory


def _round_trip(
    measuring: Measuring, one: Contender, source: RankState, target: RankState, expected: Sequence[str]
) -> None:
    seconds = measuring.save(one, source)
    measuring.results.add(SAVE, one.name, seconds, measuring.nbytes)
    if measuring.drop(measuring.directory(one.name)):
        measuring.load(one, target, expected, LOAD_COLD)
    else:
        measuring.results.refuse(LOAD_COLD, one.name, NOTHING_IS_COLD)
    measuring.warm(one.name)
    measuring.load(one, target, expected, LOAD_WARM, saved=SAVE)


def _raw(measuring: Measuring, raw: RawFiles) -> None:
    for is_direct in (True, False):
        measuring.time_raw(SAVE, raw.nbytes, lambda direct: raw.write(direct=direct), is_direct=is_direct)
    if measuring.drop_raw():
        for is_direct in (True, False):  # the direct one leaves files cold
            measuring.time_raw(
                LOAD_COLD, raw.nbytes, lambda direct: raw.read(direct=direct), is_direct=is_direct
            )
    else:
        for who in RAW:
            measuring.results.refuse(LOAD_COLD, who, NOTHING_IS_COLD)
    raw.read(direct=False)
    measuring.time_raw(
        LOAD_WARM, raw.nbytes, lambda direct: raw.read(direct=direct, is_cached=True), is_direct=False
    )
