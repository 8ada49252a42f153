"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.filesize import decimal
from rich.table import Table

from megackpt.bench.goals import Goal
from megackpt.bench.names import STALL
from megackpt.bench.report import Figure, Report, Row


def table_of_times(report: Report) -> Table:
    """Return medians and ratios, by case and contender."""
    title = (
        f"{decimal(report.state['nbytes'])} on {report.command['ranks']} ranks, {report.machine['directory']}"
    )
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    table.add_column("who", no_wrap=True)
    takes = (f"{peer} takes" for peer in report.peers)
    for heading in ("median", "rate", "of raw", *takes, "read", "equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    before: Row | None = None
    for row in report.rows:
        is_new = before is None or row.case != before.case
        if before is not None and is_new:
            table.add_section()
        table.add_row(row.case if is_new else "", row.who, *_cells(report, row))
        before = row
    return table


def table_of_figures(figures: Sequence[Figure]) -> Table:
    """Return what was measured besides times."""
    table = Table(title="besides times")
    table.add_column("what")
    table.add_column("who", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    before = ""
    for figure in figures:
        table.add_row(
            figure.name if figure.name != before else "",
            figure.who,
            f"{figure.value:.4g} {figure.unit}".rstrip(),
        )
        before = figure.name
    return table


def table_of_goals(goals: Sequence[Goal]) -> Table:
    """Return what is asked of megackpt, and what this run has found."""
    table = Table(title="goals")
    table.add_column("what")
    table.add_column("asked", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before = ""
    for goal in goals:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[goal.is_met]
        table.add_row(goal.what if goal.what != before else "", goal.asked, goal.said, verdict)
        before = goal.what
    return table


def _cells(report: Report, row: Row) -> Iterator[str]:
    if row.median_s is None or row.rate is None:
        yield from ("-",) * (5 + len(report.peers))
        return
    ratios = report.ratios(row)
    yield f"{row.median_s:.3f} s"
    yield "" if row.case == STALL else f"{decimal(int(row.rate))}/s"
    yield f"{ratios['raw']:.0%}" if "raw" in ratios else ""
    for peer in report.peers:
        yield f"{ratios[peer]:.2f}x" if peer in ratios else ""
    yield f"{row.over_read:.2f}x" if row.over_read is not None else ""
    yield {None: "", True: "yes", False: "NO"}[row.verified]
