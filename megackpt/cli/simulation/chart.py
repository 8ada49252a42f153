"""A picture of a plan: how much more or less than the mean each rank writes and reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megackpt.cli.simulation.estimate import of_all_ranks
from megackpt.cli.simulation.layout import layout_title
from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome
from megackpt.training.parallel import ParallelLayout

GB = 1e9
_SCALE = 10.0  # percent


def draw(title: str, save: SaveOutcome, load: LoadOutcome | None, path: Path) -> None:
    """Write heat maps of the deviation from the mean; the suffix of the path chooses the format.

    A row is a (pp, tp), a column is a dp rank. Ranks of a load that were not planned have the number of the
    last planned one before them.
    """
    panels: list[tuple[str, ParallelLayout, npt.NDArray[np.float64]]] = []
    if save.layout is not None:
        panels.append(("written", save.layout, save.nbytes / GB))
    if load is not None:
        planned, ranks = len(load.planned), load.layout.world_size
        sample = f" ({planned:,} of {ranks:,} ranks planned)" if planned < ranks else ""
        panels.append((f"read, each rank by itself{sample}", load.layout, of_all_ranks(load.read, load) / GB))
        group = load.shared_read / load.layout.size("dp_cp") / GB
        panels.append(
            (
                "read, exchanged over dp" if load.layout.cp == 1 else "read, exchanged over dp and cp",
                load.layout,
                _of_groups(group, load.layout),
            )
        )
    figure = Figure(figsize=(9.0, 1.2 + 3.4 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for axes, (what, layout, numbers) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_panel(figure, axes, what, layout, numbers)
    figure.savefig(path)


def _draw_panel(
    figure: Figure, axes: Axes, what: str, layout: ParallelLayout, of_rank: npt.NDArray[np.float64]
) -> None:
    placed = of_rank.reshape(layout.pp, layout.size("dp_cp"), layout.tp).transpose(0, 2, 1)
    rows = placed.reshape(layout.pp * layout.tp, layout.size("dp_cp"))
    mean, most = float(rows.mean()), float(rows.max())
    deviation = 100 * (rows / mean - 1) if mean else np.zeros_like(rows)
    # The same scale in every chart, so that charts can be compared; the mean is white.
    drawn = axes.imshow(
        deviation, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-_SCALE, vmax=_SCALE
    )
    balance = most / mean if mean else 1.0
    axes.set_title(
        f"{layout_title(layout)}: {what}\nbalance {balance:.3f} (most over mean), mean {mean:.3g} GB, "
        f"most {most:.3g} GB",
        fontsize="medium",
    )
    inner = "" if layout.cp == 1 else f", in each context-parallel rank (cp) 0 to {layout.cp - 1}"
    axes.set_xlabel(f"data-parallel rank (dp){inner}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    inner = "" if layout.tp == 1 else f",\nin each tensor-parallel rank (tp) 0 to {layout.tp - 1}"
    axes.set_ylabel(f"pipeline stage (pp){inner}")
    step = max(1, layout.pp // 8)
    stages = range(0, layout.pp, step)
    axes.set_yticks([pp * layout.tp for pp in stages], [str(pp) for pp in stages])
    beyond = float(np.abs(deviation).max(initial=0.0)) > _SCALE
    label = f"% above or below the mean, scale ±{_SCALE:.0f} %"
    figure.colorbar(drawn, ax=axes, label=label, extend="both" if beyond else "neither")


def _of_groups(of_group: npt.NDArray[np.float64], layout: ParallelLayout) -> npt.NDArray[np.float64]:
    """Give each rank the number of its data-parallel group; groups are in the order of (pp, tp)."""
    by_group = of_group.reshape(layout.pp, 1, layout.tp)
    return np.broadcast_to(by_group, (layout.pp, layout.size("dp_cp"), layout.tp)).reshape(-1)
