"""`megackpt bench`: the speed of a directory and this machine, and of saves and loads in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
from rich.console import Console

from megackpt.cli.benchmark.report import show
from megackpt.cli.benchmark.settings import CASES, DTYPES, BenchSettings
from megackpt.cli.entry import EPILOG, FAILED_CHECK, is_quiet, is_rank_0, print_json, wants_json
from megackpt.cli.locations import LocalPath, check_chart

_PIPED_WIDTH = 160  # columns of a table that goes to a file
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(iB|B)?", re.IGNORECASE)


class Size(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
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


@click.command(name="bench", epilog=EPILOG)
@click.option(
    "--dir",
    "directory",
    required=True,
    type=LocalPath(file_okay=False),
    help="The directory to write to; written files are removed. Needs several times --size.",
)
@click.option("--ranks", default=4, show_default=True, help="Processes to start; under torchrun its ranks.")
@click.option("--size", type=Size(), default="2GiB", show_default=True, help="Bytes of the whole state.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Of parameters."
)
@click.option(
    "--repeats", default=5, show_default=True, help="Measured runs, after one that is not measured."
)
@click.option("--formats", help="Other formats of megackpt, separated by commas; default all.")
@click.option(
    "--cases", default=",".join(CASES), show_default=True, help="The cases to measure, separated by commas."
)
@click.option("--chart", type=LocalPath(dir_okay=False), help="Draw a chart to a file, .png or .svg.")
def command(
    directory: str,
    ranks: int,
    size: int,
    dtype: str,
    repeats: int,
    formats: str | None,
    cases: str,
    chart: str | None,
) -> int:
    """Measure how fast a training state is saved and loaded in a directory, and how fast it could be.

    The state is that of a transformer: parameters, fp32 masters and two moments. Each format of megackpt
    saves it and loads it in turns, warm and cold, at the same layout and at others. Measured times include
    the flush to disk. Every load is compared with what was saved. Progress goes to stderr. A checkout of
    megackpt also compares with other libraries: tests/benchmarks/bench_peers.py. To use ranks of several
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
        formats=None if formats is None else split_names(formats),
        cases=split_names(cases),
        quiet=is_quiet(),
    )
    if is_rank_0():  # only rank 0 writes this file; other machines may lack its directory
        check_chart(chart)
    report = run_bench(settings)
    if report is None:  # a rank of torchrun other than 0
        return 0
    if chart is not None:
        from megackpt.cli.benchmark.chart import draw

        draw(report, Path(chart))
    if wants_json():
        print_json(report.to_json())
    else:
        show(report, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    return 0 if report.is_verified else FAILED_CHECK


def split_names(listed: str) -> tuple[str, ...]:
    """Return names that are separated by commas."""
    return tuple(name.strip() for name in listed.split(",") if name.strip())
