"""The project's goals for speed and memory, and whether a run of `bench_peers.py` has met them.

    python tests/benchmarks/bench_peers.py --dir DIRECTORY ... --json report.json
    python tests/benchmarks/goals.py report.json

A goal is a bound on a ratio or a figure of the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megackpt.cli.benchmark.report import LOAD_COLD, LOAD_WARM, OURS, SAVE, empty_table, fill_table
from tests.benchmarks.peers import names
from tests.benchmarks.peers.run import PeerReport

_MOST_MEMORY_MIB = 64
_MOST_DIGESTS_PERCENT = 5
_MOST_PLANNING_MS = 5
_LEAST_SCALING = 0.9
_MOST_OVER_READ = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One bound."""

    what: str  # what is measured
    of: str  # what it is compared with: "raw", the name of a peer, or a unit
    bound: float  # how much is asked for
    is_least: bool  # whether more is better
    measured: float | None  # what the run has found; None where it did not measure it
    doubt: float = 0.0  # how far that may be off, where it is a small difference of large times

    @property
    def is_met(self) -> bool | None:
        """Whether it is met; None if it was not measured, or is closer to the bound than can be told."""
        if self.measured is None or abs(self.measured - self.bound) < self.doubt:
            return None
        return self.measured >= self.bound if self.is_least else self.measured <= self.bound

    @property
    def asked(self) -> str:
        """The bound in words."""
        return f"at {'least' if self.is_least else 'most'} {self._in_words(self.bound)}"

    @property
    def measurement(self) -> str:
        """What was measured, in words."""
        if self.measured is None:
            return ""
        return self._in_words(self.measured) + (f" +- {self.doubt:.2g}" if self.doubt else "")

    @property
    def verdict(self) -> str:
        """Whether it is met, in words."""
        if self.measured is None:
            return "not measured"
        return {True: "met", False: "NOT MET", None: "too close to tell"}[self.is_met]

    def _in_words(self, value: float) -> str:
        if self.of == "raw":
            return f"{value:.2f} of raw"
        if self.of.startswith("x "):
            return f"{value:.2f}{self.of}"
        return f"{value:.3g} {self.of}".rstrip()


def goals_of(report: PeerReport) -> list[Goal]:
    """Return every goal that stands for the place of the run, with what the run has found."""
    return [*_of_saves_and_loads(report), *_of_resharded(report), *_of_figures(report)]


def _of_saves_and_loads(report: PeerReport) -> Iterator[Goal]:
    if report.machine["has_cold_files"]:
        yield _ratio(report, SAVE, "raw", 0.9)
        yield _ratio(report, SAVE, "dcp", 2)
        yield _ratio(report, SAVE, "mcore", 2)
        yield _ratio(report, LOAD_COLD, "raw", 0.9)
    else:
        yield _ratio(report, SAVE, "raw", 0.85)
        yield _ratio(report, SAVE, "dcp", 1.8)
    yield _ratio(report, LOAD_WARM, "dcp", 2)
    yield _ratio(report, names.SMALL_SAVE, "dcp", 3)


def _of_resharded(report: PeerReport) -> Iterator[Goal]:
    for case in dict.fromkeys(row.case for row in report.rows if " to " in row.case):
        yield _ratio(report, case, "raw", 0.8)
        row = report.row(case, OURS)
        ratio = row.over_read if row is not None else None
        yield Goal(
            what=case, of="x what is needed read", bound=_MOST_OVER_READ, is_least=False, measured=ratio
        )
        for peer in ("dcp", "mcore"):
            if report.row(case, peer) is not None:
                yield _ratio(report, case, peer, 3)


def _of_figures(report: PeerReport) -> Iterator[Goal]:
    cases = [SAVE, *([LOAD_COLD] if report.machine["has_cold_files"] else []), LOAD_WARM]
    for case in cases:
        yield _figure(report, f"{names.DIGESTS}, {case}", "%", at_most=_MOST_DIGESTS_PERCENT)
    for case in (SAVE, "load"):
        yield _figure(report, f"{names.MEMORY}, {case}", "MiB a rank", at_most=_MOST_MEMORY_MIB)
    yield _figure(report, names.PLAN_AGAIN, "ms", at_most=_MOST_PLANNING_MS)
    yield _figure(report, names.COLLECTIVES, "", at_most=1)
    yield _figure(report, names.SLOPE, "MiB a save", at_most=1)
    yield _figure(report, names.DESCRIPTORS, "", at_most=0)
    scaling = names.SCALING.format(ranks=report.machine.get("scaling_ranks"))
    for case in (SAVE, LOAD_WARM):
        yield _figure(report, f"{case}, {scaling}", "", at_least=_LEAST_SCALING)


def _ratio(report: PeerReport, case: str, against: str, bound: float) -> Goal:
    row = report.row(case, OURS)
    ratio = report.ratios(row).get(against) if row is not None else None
    of = "raw" if against == "raw" else f"x as fast as {against}"
    return Goal(what=case, of=of, bound=bound, is_least=True, measured=ratio)


def _figure(
    report: PeerReport, name: str, unit: str, *, at_most: float | None = None, at_least: float | None = None
) -> Goal:
    figure = report.figure(name, OURS)
    bound = at_most if at_most is not None else at_least
    assert bound is not None
    measured = figure.value if figure is not None else None
    doubt = report.figure(name + names.DOUBT, OURS)
    return Goal(
        what=name,
        of=unit,
        bound=bound,
        is_least=at_least is not None,
        measured=measured,
        doubt=doubt.value if doubt is not None else 0.0,
    )


def main() -> None:
    """Print the goals that a report measured."""
    report = PeerReport.from_json(json.loads(Path(sys.argv[1]).read_text()))
    goals = goals_of(report)
    table = empty_table("goals", ("what", "asked"), ("measured", ""))
    measured = [goal for goal in goals if goal.measured is not None]
    fill_table(table, [(goal.what, goal.asked, goal.measurement, goal.verdict) for goal in measured])
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    missing = dict.fromkeys(goal.what for goal in goals if goal.measured is None)
    if missing:
        console.print(f"Not measured in this run, or not against all: {'; '.join(missing)}.")


if __name__ == "__main__":
    main()
