"""`megackpt plan`: the cost of saves and loads of a job, without the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
from rich.console import Console

from megackpt.cli.entry import EPILOG, print_json, wants_json
from megackpt.cli.locations import LocalPath, check_chart, checkpoint_location
from megackpt.cli.output import ProgressBars
from megackpt.errors import DeclarationError
from megackpt.ground.arguments import did_you_mean
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES

if TYPE_CHECKING:
    from megackpt.cli.simulation import Model, ParallelLayout, StoredCheckpoint
    from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome

_PIPED_WIDTH = 120  # columns of a table that goes to a file


@click.command(name="plan", epilog=EPILOG)
@click.argument("subject", metavar="MODEL|CHECKPOINT", type=LocalPath())
@click.option(
    "--from", "source", help="Layout of the job that saves, as tp8,pp16,dp128 (cp, vpp, ep, etp, world)."
)
@click.option("--to", "target", help="Layout of the job that loads; left out: that of --from.")
@click.option("--weights-only", is_flag=True, help="Without the state of a distributed Adam optimizer.")
@click.option(
    "--ranks-planned", type=click.IntRange(1), help="Plan so many ranks of the load; all if left out."
)
@click.option("--ranks-per-node", default=8, show_default=True, help="Neighbouring ranks on one machine.")
@click.option("--write-gbps", type=float, help="GB/s (10^9 bytes) that one machine writes.")
@click.option("--read-gbps", type=float, help="GB/s that one machine reads.")
@click.option("--total-write-gbps", type=float, help="GB/s that the storage takes from all of them.")
@click.option("--total-read-gbps", type=float, help="GB/s that the storage gives to all of them.")
@click.option("--network-gbps", type=float, help="GB/s that one machine receives from others.")
@click.option(
    "--stage-gbps", type=float, help="GB/s that one rank copies to host memory for an asynchronous save."
)
@click.option(
    "--mtbf-hours", type=float, help="Hours between failures of the job: advises how often to save."
)
@click.option("--chart", type=LocalPath(dir_okay=False), help="Draw heat maps by rank: .png, .svg or .pdf.")
def command(
    subject: str,
    source: str | None,
    target: str | None,
    *,
    weights_only: bool,
    ranks_planned: int | None,
    ranks_per_node: int,
    write_gbps: float | None,
    read_gbps: float | None,
    total_write_gbps: float | None,
    total_read_gbps: float | None,
    network_gbps: float | None,
    stage_gbps: float | None,
    mtbf_hours: float | None,
    chart: str | None,
) -> None:
    """Plan the save of a job at one layout and its load at another, for every rank, in this process.

    MODEL is the name of a published model (an unknown name lists them) or a JSON file with its sizes. To plan
    only loads, give the directory of a CHECKPOINT instead. The command uses no GPU, starts no process and
    makes no tensor. It runs and times the planner of real jobs. The first save of a job is planned; later
    saves use its plan, and the advice on how often to save is about these.

    megackpt plan llama3-405b --from tp8,pp16,dp128 --to tp4,pp8,dp512 --write-gbps 10 --mtbf-hours 3
    """
    check_chart(chart)
    with ProgressBars("starting") as bars:
        from megackpt.cli.simulation import Cluster, PlanReport, estimate, parse_layout

        cluster = Cluster(
            ranks_per_node=ranks_per_node,
            write=write_gbps,
            read=read_gbps,
            total_write=total_write_gbps,
            total_read=total_read_gbps,
            network=network_gbps,
            stage=stage_gbps,
            mtbf_hours=mtbf_hours,
        )
        at, to = (None if text is None else parse_layout(text) for text in (source, target))
        if Path(subject).is_dir():
            name, parameters, save, load = _of_checkpoint(Path(subject), at, to, ranks_planned, bars)
        else:
            states = () if weights_only else None
            name, parameters, save, load = _of_model(subject, at, to, ranks_planned, bars, states=states)
        times = estimate(save, load, cluster)
        report = PlanReport(
            subject=name, parameters=parameters, save=save, load=load, cluster=cluster, times=times
        )
        if chart is not None:
            from megackpt.cli.simulation.chart import draw

            draw(name, save, load, Path(chart))
    if wants_json():
        print_json(report.to_json())
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    for table in report.tables():
        console.print(table)
    if times.advice:
        console.print(times.advice, highlight=False)


_Planned: TypeAlias = "tuple[str, int | None, SaveOutcome, LoadOutcome | None]"


def _of_model(
    subject: str,
    source: ParallelLayout | None,
    target: ParallelLayout | None,
    ranks_planned: int | None,
    bars: ProgressBars,
    *,
    states: tuple[str, ...] | None,
) -> _Planned:
    from megackpt.cli.simulation import StoredCheckpoint, check_layout, simulate_save

    name, model = _model(subject)
    if source is None:
        raise DeclarationError(
            "--from is missing: give the layout of the job that saves, as --from tp8,pp16,dp128."
        )
    target = target or source
    for layout in (source, target):  # before the first is planned, which takes a while
        check_layout(model, layout)
    bars.begin_count("planning the save, ranks", source.world_size)
    save, plan = simulate_save(model, source, states=states, advance=bars.advance)
    stored = StoredCheckpoint(plan.table, plan.writer, DIGEST_BLOCK_BYTES, name)
    load = _planned_load(model, target, stored, states, ranks_planned, bars)
    return f"{name} ({model.numel:,} parameters)", model.numel, save, load


def _of_checkpoint(
    path: Path,
    source: ParallelLayout | None,
    target: ParallelLayout | None,
    ranks_planned: int | None,
    bars: ProgressBars,
) -> _Planned:
    from megackpt.cli.simulation import layout_title, open_stored

    if source is not None:
        raise DeclarationError(
            f"--from {layout_title(source)} is given for {path}, which is a checkpoint and has been saved. "
            f"Leave it out; the layout to load at is --to.",
            path=str(path),
        )
    path = Path(checkpoint_location(str(path)))
    save, stored, model, states = open_stored(path)
    if target is None:
        return str(path), None, save, None
    _check_has_layers(model, path)
    load = _planned_load(model, target, stored, states, ranks_planned, bars)
    return str(path), None, save, load


def _check_has_layers(model: Model, path: Path) -> None:
    if not model.layers:
        raise DeclarationError(
            f"{path} has no arrays of layers, such as decoder.layers.0.mlp.weight, so no layout can be "
            f"planned for it. Leave --to out to see what it holds.",
            path=str(path),
        )


def _planned_load(
    model: Model,
    target: ParallelLayout,
    stored: StoredCheckpoint,
    states: tuple[str, ...] | None,
    ranks_planned: int | None,
    bars: ProgressBars,
) -> LoadOutcome:
    from megackpt.cli.simulation import simulate_load

    bars.begin_count("planning the load, ranks", min(target.world_size, ranks_planned or target.world_size))
    return simulate_load(
        model, target, stored, states=states, ranks_planned=ranks_planned, advance=bars.advance
    )


def _model(subject: str) -> tuple[str, Model]:
    from megackpt.cli.simulation import PRESETS, build_model, read_sizes

    if subject in PRESETS:
        return subject, build_model(PRESETS[subject])
    path = Path(subject)
    if not path.is_file():
        raise DeclarationError(
            f"{subject!r} is no model, file or directory. Models are {', '.join(sorted(PRESETS))}; a JSON "
            f"file has the sizes of another one.{did_you_mean(subject, PRESETS)}",
            path=subject,
        )
    return path.stem, build_model(read_sizes(path))
