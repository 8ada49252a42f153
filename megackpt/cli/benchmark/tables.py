"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.filesize import decimal
from rich.table import Table

from megackpt.cli.benchmark.names import ASYNC_STALL
from megackpt.cli.benchmark.report import Figure, Report, Row


def table_of_times(report: Report) -> Table:
    """Return medians and ratios, by case and contender."""
    title = (
        f"{decimal(report.state['nbytes'])} on {report.command['ranks']} ranks, {report.machine['directory']}"
    )
    takes = (f"{peer} takes" for peer in report.peers)
    table = empty_table(title, ("case", "who"), ("median", "rate", "of raw", *takes, "read", "equal"))
    fill_table(table, [(row.case, row.who, *_cells(report, row)) for row in report.rows], has_sections=True)
    return table


def table_of_figures(figures: Sequence[Figure]) -> Table:
    """Return what was measured besides times."""
    table = empty_table("figures", ("what", "who"), ("measured",))
    texts = (f"{figure.value:.4g} {figure.unit}".rstrip() for figure in figures)
    fill_table(table, [(f.name, f.who, text) for f, text in zip(figures, texts, strict=True)])
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
    yield "" if row.case == ASYNC_STALL else f"{decimal(int(row.rate))}/s"
    yield f"{ratios['raw']:.0%}" if "raw" in ratios else ""
    for peer in report.peers:
        yield f"{ratios[peer]:.2f}x" if peer in ratios else ""
    yield f"{row.over_read:.2f}x" if row.over_read is not None else ""
    yield {None: "", True: "yes", False: "NO"}[row.verified]
