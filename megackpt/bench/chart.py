"""A picture of a report: bytes per second by case, and the raw limits.

Owns which cases are in it: those that move the whole state on all ranks.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from megackpt.bench.names import LOAD_COLD, LOAD_WARM, SAVE
from megackpt.bench.report import Report, Row


def draw(report: Report, path: Path) -> None:
    """Write a bar chart in the format that the ending of path says."""
    rows = [row for row in report.rows if not row.is_raw and _is_drawn(row)]
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.who for row in rows))
    figure = Figure(figsize=(max(8.0, 2.2 * len(cases)), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        rates = {row.case: (row.rate or 0.0) / 1e9 for row in rows if row.who == name}
        places = [j - 0.4 + (i + 0.5) * width for j in range(len(cases))]
        axes.bar(places, [rates.get(case, 0.0) for case in cases], width, label=name)
    for j, case in enumerate(cases):
        limit = report.limit(case)
        if limit:
            label = "raw I/O" if j == 0 else "_"  # one that begins with _ has no entry in the legend
            axes.hlines(limit / 1e9, j - 0.4, j + 0.4, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases])
    axes.set_ylabel("GB/s, all ranks together, median")
    axes.set_title(f"{report.state['nbytes'] / 1e9:.2f} GB on {report.command['ranks']} ranks")
    if names:
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)


def _is_drawn(row: Row) -> bool:
    return row.case in (SAVE, LOAD_COLD, LOAD_WARM) or " to " in row.case
