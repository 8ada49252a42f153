"""The report of a benchmark: times by case and library, and ratios; as a table in a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

SAVE = "save"
LOAD_COLD = "load, cold"
LOAD_WARM = "load, warm"
COLD = ", cold"  # ends the name of a resharded load

OURS = "megackpt"
RAW_DIRECT = "raw, direct"
RAW_BUFFERED = "raw, buffered"
RAW = (RAW_DIRECT, RAW_BUFFERED)
"""Files without a checkpoint: around the page cache, and through it."""


_BUSY = 0.5  # load average per CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one contender.

    Attributes:
        case: what was done.
        who: by whom; one of RAW for files without a checkpoint.
        nbytes: bytes of all ranks that were written, each once, or that they asked for.
        seconds: of each measured run, from a common start to the end of the slowest rank.
        verified: whether what was loaded, or what was saved and then loaded, is equal after every run, that
            which does not count among them; None for what is not compared.
        differing: a key whose bits were not those that were saved.
        unsupported: why it was not done; there are no seconds then.
        read_nbytes: bytes that all ranks read from files in the last run, by the system's count; None where
            it is not counted.
    """

    case: str
    who: str
    nbytes: int = 0
    seconds: tuple[float, ...] = ()
    verified: bool | None = None
    differing: str | None = None
    unsupported: str | None = None
    read_nbytes: int | None = None

    @property
    def is_raw(self) -> bool:
        """Whether it is files without a checkpoint."""
        return self.who in RAW

    @property
    def median_s(self) -> float | None:
        """The median time; None if it was not done."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Bytes per second in median; None if it was not done."""
        return self.nbytes / self.median_s if self.median_s else None

    @property
    def over_read(self) -> float | None:
        """Bytes read per byte asked for; None where it is not known."""
        return self.read_nbytes / self.nbytes if self.read_nbytes is not None and self.nbytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows, and what they stand for.

    Attributes:
        command: the settings.
        machine: where it ran; "has_cold_files" says whether files can be taken out of memory there.
        state: what was saved.
        rows: what was timed.
    """

    command: dict[str, Any]
    machine: dict[str, Any]
    state: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def peers(self) -> list[str]:
        """Names of the other libraries that took part."""
        names = dict.fromkeys(row.who for row in self.rows)
        return [name for name in names if name not in RAW and not name.startswith(OURS)]

    @property
    def is_verified(self) -> bool:
        """Whether every load gave what was saved."""
        return all(row.verified is not False for row in self.rows)

    def row(self, case: str, who: str) -> Row | None:
        """Return the row of a contender in a case that was measured; None if there is none."""
        return next((r for r in self.rows if (r.case, r.who) == (case, who) and r.seconds), None)

    def limit(self, case: str) -> float | None:
        """Return the bytes per second of the faster raw I/O of a case; None where there is none."""
        rates = [r.rate for r in self.rows if r.is_raw and r.case == case and r.rate]
        return max(rates, default=None)

    def ratios(self, row: Row) -> dict[str, float]:
        """Compare a row: its share of the raw limit, and how many times faster it is than each peer."""
        ratios: dict[str, float] = {}
        if row.rate is None or row.median_s is None or row.is_raw:
            return ratios
        limit = self.limit(row.case)
        if limit:
            ratios["raw"] = row.rate / limit
        for peer in self.peers:
            theirs = self.row(row.case, peer)
            if theirs is not None and theirs.median_s and peer != row.who:
                ratios[peer] = theirs.median_s / row.median_s
        return ratios

    def unsupported_cases(self) -> list[str]:
        """Say once why something was not done."""
        return list(dict.fromkeys(f"{r.who}: {r.unsupported}." for r in self.rows if r.unsupported))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "command": self.command,
            "machine": self.machine,
            "state": self.state,
            "rows": [dict(self._of(row)) for row in self.rows],
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Report:
        """Return what `to_json` was called on."""
        stored = ("case", "who", "nbytes", "verified", "differing", "unsupported", "read_nbytes")
        rows = tuple(
            Row(seconds=tuple(row["seconds"]), **{name: row[name] for name in stored})
            for row in values["rows"]
        )
        return Report(rows=rows, **{k: values[k] for k in ("command", "machine", "state")})

    def _of(self, row: Row) -> Iterator[tuple[str, Any]]:
        yield from asdict(row).items()
        yield "median_s", row.median_s
        yield "bytes_per_s", row.rate
        yield "over_read", row.over_read
        yield "ratios", self.ratios(row)


# The report as a table.


def show(report: Report, console: Console) -> None:
    """Print the table of times, and notes on how to read it."""
    console.print(table_of_times(report))
    console.print(
        "of raw: share of the faster raw I/O of that case. vs X: how many times faster or slower than X. "
        "read: bytes read from files per byte asked for. equal: what was loaded is what was "
        "saved, by a 128-bit digest of every tensor."
    )
    machine = report.machine
    if machine["load_before"] > _BUSY * machine["cpus"]:
        console.print(
            f"- The machine was busy before the run: a load average of {machine['load_before']:.1f} on "
            f"{machine['cpus']} CPUs. Times of a quiet one differ, and so do ratios."
        )
    for reason in report.unsupported_cases():
        console.print(f"- {reason}")


def table_of_times(report: Report) -> Table:
    """Return medians and ratios, by case and contender."""
    title = (
        f"{decimal(report.state['nbytes'])} on {report.command['ranks']} ranks, {report.machine['directory']}"
    )
    takes = (f"vs {peer}" for peer in report.peers)
    table = empty_table(title, ("case", "who"), ("median", "rate", "of raw", *takes, "read", "equal"))
    fill_table(table, [(row.case, row.who, *_cells(report, row)) for row in report.rows], has_sections=True)
    return table


def empty_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table with columns that are set to the left and to the right."""
    table = Table(title=title)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def fill_table(table: Table, rows: Sequence[tuple[str, ...]], *, has_sections: bool = False) -> None:
    """Add rows; a first cell that repeats the one above stays empty."""
    before: str | None = None
    for first, *others in rows:
        if has_sections and before not in (None, first):
            table.add_section()
        table.add_row("" if first == before else first, *others)
        before = first


def faster_text(ratio: float) -> str:
    """Return how many times faster something is than what takes `ratio` times as long.

    >>> faster_text(2.0), faster_text(0.5)
    ('2.00x faster', '2.00x slower')
    """
    return f"{ratio:.2f}x faster" if ratio >= 1 or ratio <= 0 else f"{1 / ratio:.2f}x slower"


def _cells(report: Report, row: Row) -> Iterator[str]:
    if row.median_s is None or row.rate is None:
        yield from ("-",) * (5 + len(report.peers))
        return
    ratios = report.ratios(row)
    yield f"{row.median_s:.3f} s"
    yield f"{decimal(int(row.rate))}/s" if row.nbytes else ""
    yield f"{ratios['raw']:.0%}" if "raw" in ratios else ""
    for peer in report.peers:
        yield faster_text(ratios[peer]) if peer in ratios else ""
    yield f"{row.over_read:.2f}x" if row.over_read is not None else ""
    yield {None: "", True: "yes", False: "NO"}[row.verified]
