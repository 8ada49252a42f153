"""Draws a report: bytes per second by case and library, with the raw limit of each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megackpt.cli.benchmark.report import COLD, LOAD_COLD, LOAD_WARM, SAVE, Report, Row

_WIDTH_INCHES = 9.0  # fits a page
_PANEL_INCHES = 2.6


def draw(report: Report, path: Path) -> None:
    """Write a bar chart; the suffix of the path chooses the format.

    One panel shows saves and loads at the same layout, one shows warm resharded loads, one shows cold ones.
    Panels without a case are left out.
    """
    rows = [row for row in report.rows if not row.is_raw and row.rate]
    panels = _panels(list(dict.fromkeys(row.case for row in rows)))
    libraries = list(dict.fromkeys(row.who for row in rows if any(row.case in c for c in panels.values())))
    figure = Figure(figsize=(_WIDTH_INCHES, 0.8 + _PANEL_INCHES * max(1, len(panels))), layout="constrained")
    figure.suptitle(
        f"{report.state['nbytes'] / 1e9:.2f} GB on {report.command['ranks']} ranks: GB/s of all ranks, median"
    )
    all_axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axes, (title, shown) in zip(all_axes, panels.items(), strict=False):
        _draw_panel(axes, report, title, shown, libraries, rows)
    handles = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=6, fontsize="small"
        )
    figure.savefig(path)


def _panels(cases: Sequence[str]) -> dict[str, list[str]]:
    """Return the cases of each panel that has one, by its title."""
    resharded = [case for case in cases if " to " in case]
    panels = {
        "same layout": [case for case in (SAVE, LOAD_COLD, LOAD_WARM) if case in cases],
        "another layout, files in memory": [case for case in resharded if not case.endswith(COLD)],
        "another layout, cold files": [case for case in resharded if case.endswith(COLD)],
    }
    return {title: shown for title, shown in panels.items() if shown}


def _draw_panel(
    axes: Axes,
    report: Report,
    title: str,
    cases: Sequence[str],
    libraries: Sequence[str],
    rows: Sequence[Row],
) -> None:
    """Draw the cases of one panel; the bars of a case are those of the libraries that can do it."""
    width = 0.8 / max(1, len(libraries))
    for i, case in enumerate(cases):
        rates = {row.who: row.rate or 0.0 for row in rows if row.case == case}
        able = [library for library in libraries if library in rates]
        for j, library in enumerate(able):
            centre = i + (j - (len(able) - 1) / 2) * width
            colour = f"C{libraries.index(library)}"
            axes.bar(centre, rates[library] / 1e9, width, color=colour, label=library)
        limit = report.limit(case)
        if limit:
            axes.hlines(limit / 1e9, i - 0.45, i + 0.45, colors="black", linestyles="dashed", label="raw I/O")
    labels = [case if case == LOAD_COLD else case.removesuffix(COLD) for case in cases]
    labels = [label.replace("optimizer, ", "optimizer,\n") for label in labels]
    axes.set_xticks(range(len(cases)), labels, fontsize="small")
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_title(title, fontsize="medium", loc="left")
