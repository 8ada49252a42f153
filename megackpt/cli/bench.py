"""`megackpt bench`: the speed of a directory and this machine, and of saves and loads in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from megackpt.cli.benchmark.settings import CASES, DTYPES, PEERS, BenchSettings
from megackpt.cli.entry import EXIT_CODES, FAILED_CHECK, is_quiet, is_rank_0, output_options, print_result
from megackpt.cli.locations import LocalPath, check_chart, check_output

if TYPE_CHECKING:
    from megackpt.cli.benchmark.report import Report


_PIPED_WIDTH = 160  # columns of a table that goes to a file
_BUSY = 0.5  # load average per CPU
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(iB|B)?", re.IGNORECASE)


class _Size(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
    """A number of bytes, as 2GiB, 512MiB or 1000000; K, M, G and T are powers of 1024."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; give one as 2GiB, 512MiB or a number of bytes.", param, ctx)
        return int(float(match["number"]) * _UNITS[match["unit"].upper()])


@click.command(name="bench", epilog=EXIT_CODES)
@click.option(
    "--dir",
    "directory",
    required=True,
    type=LocalPath(file_okay=False),
    help="The directory to write to; written files are removed. Needs several times --size.",
)
@click.option("--ranks", default=4, show_default=True, help="Processes to start; under torchrun its ranks.")
@click.option("--size", type=_Size(), default="2GiB", show_default=True, help="Bytes of the whole state.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Of parameters."
)
@click.option(
    "--repeats", default=5, show_default=True, help="Measured runs, after one that is not measured."
)
@click.option(
    "--vs",
    "peers",
    default="",
    help=f"Libraries to compare with, separated by commas: {', '.join(PEERS)}, or module:class.",
)
@click.option("--formats", help="Other formats of megackpt, separated by commas; default all.")
@click.option(
    "--cases", default=",".join(CASES), show_default=True, help="The cases to measure, separated by commas."
)
@click.option(
    "--scaling", default=8, show_default=True, help="Ranks to compare with one rank; under torchrun all."
)
@click.option("--long-run", default=50, show_default=True, help="Saves and loads of the case long.")
@click.option("--chart", type=LocalPath(dir_okay=False), help="Draw a chart to a file, .png or .svg.")
@click.option(
    "--profile", type=LocalPath(dir_okay=False), help="Trace one save and one load, for ui.perfetto.dev."
)
@output_options
def command(
    directory: str,
    ranks: int,
    size: int,
    dtype: str,
    repeats: int,
    peers: str,
    formats: str | None,
    cases: str,
    scaling: int,
    long_run: int,
    chart: str | None,
    profile: str | None,
    as_json: bool,
) -> int:
    """Measure how fast a training state is saved and loaded in a directory, and how fast it could be.

    The state is that of a transformer: parameters, fp32 masters and two moments. Each format of megackpt and
    each peer saves it and loads it in turns, warm and cold, at the same layout and at others. Measured times
    include the flush to disk. Every load is compared with what was saved. Other cases measure memory, the
    cost of digests, scaling, planning and a long run. Progress goes to stderr. To use ranks of several
    machines:

    torchrun --nnodes 2 --nproc-per-node 4 ... -m megackpt.cli bench --dir /shared/bench
    """
    from megackpt.cli.benchmark.world import run_bench

    settings = BenchSettings(
        directory=directory,
        ranks=ranks,
        size=size,
        dtype=dtype,
        repeats=repeats,
        peers=_names(peers),
        formats=None if formats is None else _names(formats),
        cases=_names(cases),
        scaling=scaling,
        long_run=long_run,
        profile=profile,
        quiet=is_quiet(),
    )
    if is_rank_0():  # only rank 0 writes these files; other machines may lack their directories
        check_output(profile)
        check_chart(chart)
    report = run_bench(settings)
    if report is None:  # a rank of torchrun other than 0
        return 0
    if chart is not None:
        from megackpt.cli.benchmark.chart import draw

        draw(report, Path(chart))
    if as_json:
        print_result(report.to_json(), "", as_json=True)
    else:
        _show(report, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    return 0 if report.is_verified else FAILED_CHECK


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def _show(report: Report, console: Console) -> None:
    from megackpt.cli.benchmark.tables import table_of_figures, table_of_times

    console.print(table_of_times(report))
    console.print(
        "of raw: share of the faster raw I/O of that case. X takes: how many times as long X takes (below "
        "1, X is faster). read: bytes read from files per byte asked for. equal: what was loaded is what was "
        "saved, by a 128-bit digest of every tensor."
    )
    for peer, kept in report.machine["peers"].items():
        console.print(f"- {peer}: {kept}.")
    machine = report.machine
    if machine["load_before"] > _BUSY * machine["cpus"]:
        console.print(
            f"- The machine was busy before the run: a load average of {machine['load_before']:.1f} on "
            f"{machine['cpus']} CPUs. Times of a quiet one differ, and so do ratios."
        )
    for reason in report.unsupported_cases():
        console.print(f"- {reason}")
    if report.figures:
        console.print(table_of_figures(report.figures))
    for name, ranks in report.phases.items():
        shares = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in ranks[0].items())
        console.print(f"{name}, rank 0, seconds: {shares}")
