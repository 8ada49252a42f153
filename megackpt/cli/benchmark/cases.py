"""The cases: saves, loads at the layout of the save, and loads at another layout.

Files are cold where they can be taken out of memory, and warm. The raw limit of a resharded load is the time
to read as many bytes per rank as that rank needs from plain files of the size of the checkpoint, with as many
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megackpt.cli.benchmark.contenders import Contender
from megackpt.cli.benchmark.measure import BenchRun
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.report import COLD, LOAD_COLD, LOAD_WARM, RAW, SAVE
from megackpt.cli.benchmark.settings import PEER_ROUNDS
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
            _raw_round_trip(run, raw)
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


def _raw_round_trip(run: BenchRun, raw: RawFiles) -> None:
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


@dataclass(frozen=True, slots=True)
class Change:
    """A checkpoint's layout, and one at which it is loaded."""

    saved_at: GridLayout
    loaded_at: GridLayout

    @property
    def case(self) -> str:
        """What it is called."""
        kind = "flat optimizer, " if self.saved_at.is_flat else ""
        return f"{kind}{self.saved_at} to {self.loaded_at}"


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a rank loads to, and what has to be there afterwards."""

    state: RankState
    expected: Sequence[str] = field(repr=False)


def changes(ranks: int) -> list[list[Change]]:
    """Return the changes that are measured, by the layout of the save; none for a single rank.

    They are a change of TP, one of PP, one of both, and with a flat optimizer one of DP and one of DP and TP.

    >>> [[change.case for change in group] for group in changes(4)]  # doctest: +NORMALIZE_WHITESPACE
    [['TP4 to TP2xDP2'], ['PP4 to PP2xDP2', 'PP4 to TP2xPP2'],
     ['flat optimizer, DP4 to PP2xDP2', 'flat optimizer, DP4 to TP2xDP2']]
    """
    if ranks == 1:
        return []
    half = ranks // 2
    flat = GridLayout(dp=ranks, is_flat=True)
    return [
        [Change(GridLayout(tp=ranks), GridLayout(tp=half, dp=2))],
        [
            Change(GridLayout(pp=ranks), GridLayout(pp=half, dp=2)),
            Change(GridLayout(pp=ranks), GridLayout(pp=half, tp=2)),
        ],
        [
            Change(flat, GridLayout(pp=2, dp=half, is_flat=True)),
            Change(flat, GridLayout(tp=2, dp=half, is_flat=True)),
        ],
    ]


def measure_reshard(run: BenchRun) -> None:
    """Measure every change of layout. Collective."""
    groups = changes(run.ranks)
    cases = [change.case for group in groups for change in group]
    for group in groups:
        able = _save_with_all(run, group)
        raw = run.raw_files()
        raw.write(direct=False)
        for change in group:
            run.progress.begin_part(change.case, cases.index(change.case), len(cases))
            _load_resharded(run, change, able, raw)
        del raw
        run.clear()


def _save_with_all(run: BenchRun, group: Sequence[Change]) -> list[Contender]:
    """Save once with everyone who can load what was saved; return them."""
    able: list[Contender] = []
    source = run.state(group[0].saved_at)
    for contender in run.everyone:
        reasons = [contender.unsupported_reason(change.saved_at, change.loaded_at) for change in group]
        for change, reason in zip(group, reasons, strict=True):
            if reason is not None:
                run.results.mark_unsupported(change.case, contender.name, reason)
        if None in reasons:
            able.append(contender)
            run.save(contender, source)
    return able


def _load_resharded(run: BenchRun, change: Change, able: Sequence[Contender], raw: RawFiles) -> None:
    state = run.state(change.loaded_at)
    target = _Target(state, fingerprints(state))
    for contender in run.turns([None, *able], peer_rounds=PEER_ROUNDS):
        if contender is None:
            _read_raw(run, change, raw, target.state.nbytes)
            continue
        if contender not in run.formats and run.drop(run.directory(contender.name)):
            run.load(contender, target.state, target.expected, change.case + COLD)
        run.warm(contender.name)
        run.load(contender, target.state, target.expected, change.case)


def _read_raw(run: BenchRun, change: Change, raw: RawFiles, nbytes: int) -> None:
    def read(direct: bool, *, is_cached: bool = False) -> None:
        raw.read(nbytes, direct=direct, is_cached=is_cached)

    if run.has_cold_files and run.drop_raw():
        for is_direct in (True, False):
            run.time_raw(change.case + COLD, nbytes, read, is_direct=is_direct)
    read(False)
    run.time_raw(change.case, nbytes, partial(read, is_cached=True), is_direct=False)


CASES: dict[str, Callable[[BenchRun], None]] = {
    "save": measure_same_layout,
    "load": measure_same_layout,
    "reshard": measure_reshard,
}
"""The function to call for a name of `settings.CASES`, in order; collective."""
