"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from megackpt.cli.benchmark.report import Report, Row

_BUSY = 0.5  # load average per CPU


def show(report: Report, console: Console) -> None:
    """Print the table of times, and notes on how to read it."""
    console.print(table_of_times(report))
    console.print(
        "of raw: share of the faster raw I/O of that case. X takes: how many times as long X takes (below "
        "1, X is faster). read: bytes read from files per byte asked for. equal: what was loaded is what was "
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
    takes = (f"{peer} takes" for peer in report.peers)
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


def _cells(report: Report, row: Row) -> Iterator[str]:
    if row.median_s is None or row.rate is None:
        yield from ("-",) * (5 + len(report.peers))
        return
    ratios = report.ratios(row)
    yield f"{row.median_s:.3f} s"
    yield f"{decimal(int(row.rate))}/s" if row.nbytes else ""
    yield f"{ratios['raw']:.0%}" if "raw" in ratios else ""
    for peer in report.peers:
        yield f"{ratios[peer]:.2f}x" if peer in ratios else ""
    yield f"{row.over_read:.2f}x" if row.over_read is not None else ""
    yield {None: "", True: "yes", False: "NO"}[row.verified]
