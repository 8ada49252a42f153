"""The settings, one rank's part, and the report of a benchmark with other libraries and more cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megackpt.cli.benchmark.contenders import Contender
from megackpt.cli.benchmark.measure import BenchRun
from megackpt.cli.benchmark.report import SAVE, Report, Row
from megackpt.cli.benchmark.settings import BenchSettings, check_even, check_known
from megackpt.errors import DeclarationError
from tests.benchmarks.peers.contenders import PEERS, Peer, make_peer
from tests.benchmarks.peers.names import ASYNC_TOTAL

CASES = ("save", "load", "reshard", "async", "digests", "memory", "small", "plan", "long", "scaling")
"""All that can be measured, in order. `save` and `load` are one case: a load needs a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings(BenchSettings):
    """One run of the benchmark."""

    known_cases: ClassVar[tuple[str, ...]] = CASES

    cases: tuple[str, ...] = CASES
    # libraries to compare with: names of PEERS, or `module:class` of a `Peer` that ranks can import
    peers: tuple[str, ...] = ()
    # how many ranks are compared with one, each time with the same state; under torchrun all
    scaling: int = 8
    long_run: int = 50  # how many saves and loads the case `long` makes
    # where to write a trace of one save and one load, as JSON for Perfetto; None for none
    profile: str | None = None

    def __post_init__(self) -> None:
        BenchSettings.__post_init__(self)
        check_even("scaling", self.scaling)
        if self.long_run < 3:
            raise DeclarationError(f"long_run is {self.long_run}; give at least 3, to see a slope.")
        check_known("peer", [name for name in self.peers if ":" not in name], PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Something measured that is no time of a case."""

    name: str  # what, as in `names`
    who: str  # of whom
    value: float  # how much, of the unit
    unit: str  # "MiB", "%", "ms", or "" for a count or a ratio


class PeerRun(BenchRun):
    """One rank's part, with the peers of the settings, and figures that are no times of a case.

    Attributes:
        leaders: the native format and the peers.
    """

    settings: PeerSettings
    peers: Sequence[Peer]

    def __init__(self, settings: PeerSettings, root: Path, *, cases: int) -> None:
        peers = [make_peer(name) for name in settings.peers]
        super().__init__(settings, root, cases=cases, peers=peers)
        self.leaders: list[Contender] = [self.native, *peers]
        self.figures: list[Figure] = []

    def note(self, name: str, who: str, value: float, unit: str = "") -> None:
        """Note a figure."""
        self.figures.append(Figure(name=name, who=who, value=value, unit=unit))

    def row(self, case: str, who: str) -> Row:
        """Return the row of a case and a contender so far; without seconds if nothing was noted."""
        rows = self.results.rows()
        return next((row for row in rows if (row.case, row.who) == (case, who)), Row(case=case, who=who))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport(Report):
    """A report with figures."""

    figures: tuple[Figure, ...] = ()  # what was measured besides times
    # with a profile, seconds by what was done ("save", "load"), rank and phase; sums over threads
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def figure(self, name: str, who: str) -> Figure | None:
        """Return a figure; None if it was not measured."""
        return next((f for f in self.figures if (f.name, f.who) == (name, who)), None)

    def limit(self, case: str) -> float | None:
        """Return the raw limit of a case. That of an asynchronous save is that of a save."""
        return Report.limit(self, SAVE if case == ASYNC_TOTAL else case)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        figures = [asdict(figure) for figure in self.figures]
        return {**Report.to_json(self), "figures": figures, "phases": self.phases}

    @staticmethod
    def from_json(values: dict[str, Any]) -> PeerReport:
        """Return what `to_json` was called on."""
        figures = tuple(Figure(**figure) for figure in values["figures"])
        return PeerReport(**fields_of(Report.from_json(values)), figures=figures, phases=values["phases"])


def fields_of(report: Report) -> dict[str, Any]:
    """Return the fields of a report without figures."""
    return {name: getattr(report, name) for name in ("command", "machine", "state", "rows")}
