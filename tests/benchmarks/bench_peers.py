"""Saves and loads of megackpt compared with those of other libraries, and what else can be measured of them.

Run by hand: `python tests/benchmarks/bench_peers.py --dir DIRECTORY [--vs dcp,mcore,torch] [--cases CASES]
[--json FILE]`, or with torchrun on ranks of several machines. The other options are as for `megackpt bench`.

Cases:
    save, load: save and durable commit at TP over all ranks; load of cold and of warm files
    reshard: loads after a change of TP, of PP, of both; with a flat optimizer of DP, of DP and TP
    async: how long training waits for a save, and when that save is durable; the state changes meanwhile
    digests: saves and loads with and without digests, in turns
    memory: peak of resident memory above its size before
    small: 200 arrays of 1 KiB, equal on all ranks
    plan: planning of a save with the same structure as the last save, and its collectives
    long: many saves and loads (--long-run, 50), synchronous and asynchronous in turn: slope of resident
        memory, open descriptors
    scaling: one rank and --scaling ranks with the same state
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import click
from rich.console import Console

from megackpt.cli.bench import Size, split_names
from megackpt.cli.benchmark.report import empty_table, fill_table, show
from megackpt.cli.benchmark.settings import DTYPES
from megackpt.cli.entry import is_rank_0
from megackpt.cli.locations import check_chart
from megackpt.errors import CheckpointError
from tests.benchmarks.measuring import options
from tests.benchmarks.peers.contenders import PEERS
from tests.benchmarks.peers.run import CASES, PeerReport, PeerSettings
from tests.benchmarks.peers.world import run_peers

_PIPED_WIDTH = 160  # columns of a table that goes to a file


def main() -> int:
    """Measure, and print the tables; return 1 if a load gave something else than was saved."""
    arguments = options(
        __doc__,
        dir=Path,
        ranks=4,
        size={"type": parse_size, "default": 2 << 30, "help": "bytes of the whole state; default 2GiB"},
        dtype={"choices": DTYPES, "default": DTYPES[0]},
        repeats=5,
        vs={"default": "", "help": f"separated by commas: {', '.join(PEERS)}, or module:class"},
        formats={"help": "other formats of megackpt, separated by commas; default all"},
        cases={"default": ",".join(CASES), "help": "separated by commas; default all: %(default)s"},
        scaling={"type": int, "default": 8, "help": "ranks to compare with one rank; under torchrun all"},
        long_run={"type": int, "default": 50, "help": "saves and loads of the case long"},
        chart={"type": Path, "help": "draw a chart to a file, .png or .svg"},
        profile={"type": Path, "help": "trace one save and one load to a file for ui.perfetto.dev"},
        json={"type": Path, "help": "write the report to a file"},
        quiet={"action": "store_true", "help": "no progress on stderr"},
    )
    try:
        settings = PeerSettings(
            directory=str(arguments.dir),
            ranks=arguments.ranks,
            size=arguments.size,
            dtype=arguments.dtype,
            repeats=arguments.repeats,
            peers=split_names(arguments.vs),
            formats=None if arguments.formats is None else split_names(arguments.formats),
            cases=split_names(arguments.cases),
            scaling=arguments.scaling,
            long_run=arguments.long_run,
            profile=None if arguments.profile is None else str(arguments.profile),
            quiet=arguments.quiet,
        )
        if is_rank_0():  # only rank 0 writes these files; other machines may lack their directories
            check_chart(None if arguments.chart is None else str(arguments.chart))
            for file in (arguments.profile, arguments.json):
                check_output(file)
        report = run_peers(settings)
    except CheckpointError as error:
        raise SystemExit(str(error)) from error
    if report is None:  # a rank of torchrun other than 0
        return 0
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.to_json(), indent=1, sort_keys=True))
    if arguments.chart is not None:
        from megackpt.cli.benchmark.chart import draw

        draw(report, arguments.chart)
    show_all(report, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    return 0 if report.is_verified else 1


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 512MiB."""
    try:
        return Size().convert(text, None, None)
    except click.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from error


def check_output(file: Path | None) -> None:
    """Raise an error, before anything is measured, if a result cannot be written to a file."""
    if file is not None and not file.absolute().parent.is_dir():
        raise SystemExit(f"{file}: there is no such directory. Give a file in one that exists.")


def show_all(report: PeerReport, console: Console) -> None:
    """Print the table of times, the threads of peers, figures, and the phases of a profile."""
    show(report, console)
    for peer, kept in report.machine["peers"].items():
        console.print(f"- {peer}: {kept}.")
    if report.figures:
        table = empty_table("figures", ("what", "who"), ("measured",))
        rows = [(f.name, f.who, f"{f.value:.4g} {f.unit}".rstrip()) for f in report.figures]
        fill_table(table, rows)
        console.print(table)
    for name, ranks in report.phases.items():
        shares = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in ranks[0].items())
        console.print(f"{name}, rank 0, seconds: {shares}")


if __name__ == "__main__":
    sys.exit(main())
