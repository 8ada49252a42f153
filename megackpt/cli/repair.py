"""`megackpt repair`: replace damaged files of a checkpoint, from parity files or copies."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import (
    EPILOG,
    FAILED_CHECK,
    is_rank_0,
    print_json,
    unsafe_pickle_option,
    wants_json,
)
from megackpt.cli.locations import checkpoint_location
from megackpt.cli.output import ProgressBars, counted, show, table_of

if TYPE_CHECKING:
    from megackpt.whole.repair import RepairReport
    from megackpt.whole.repair_search import RepairedFile


@click.command(name="repair", epilog=EPILOG)
@click.argument("path", metavar="PATH")
@click.option("--from", "copies", metavar="OTHER", multiple=True, help="A copy of the same save; repeatable.")
@click.option("--dry-run", is_flag=True, help="Show what can be repaired, and change nothing.")
@click.option("--partial", is_flag=True, help="Repair what can be repaired, even if other damage is left.")
@unsafe_pickle_option
def command(
    path: str,
    *,
    copies: tuple[str, ...],
    dry_run: bool,
    partial: bool,
    allow_unsafe_pickle: bool,
) -> int:
    """Repair the checkpoint in the directory PATH.

    Reads every byte. Damaged and lost files are computed from parity files, if the checkpoint was saved
    with them, or taken from copies. Each new file is written next to the old one, verified, and replaces it
    in one step. If some damage cannot be repaired, nothing is changed, unless --partial is given. Do not
    repair while a job saves to the same directory.

    Exit code 0: the checkpoint is whole, or with --dry-run can be made whole; 1: damage is left.
    """
    if not is_rank_0():
        return 0  # under torchrun one process repairs
    with ProgressBars() as bars:
        from megackpt.whole.repair import repair

        location, *sources = [checkpoint_location(p, takes_latest=False) for p in (path, *copies)]
        report = repair(
            location,
            sources,
            dry_run=dry_run,
            partial=partial,
            allow_unsafe_pickle=allow_unsafe_pickle,
            progress=bars,
        )
    if wants_json():
        result = asdict(report) | {
            "is_whole": report.is_whole,
            "damages": [damage.to_json() for damage in report.damages],
            "remaining": [damage.to_json() for damage in report.remaining],
        }
        print_json(result)
    else:
        _show(report)
    return 0 if report.is_whole else FAILED_CHECK


def _show(report: RepairReport) -> None:
    if report.files:
        title = f"{report.location}: {'repaired' if report.is_applied else 'can be repaired'}"
        show(table_of(title, map(_cells, report.files), left=("file", "from", "bytes")))
    if report.remaining:
        rows = ((d.file, d.key or "", d.what) for d in report.remaining)
        show(table_of("Damage that is left", rows, left=("file", "key", "what is wrong")))
        for reason in report.unusable_sources:
            show(f"Not used: {' '.join(reason.split())}")
    show(_verdict(report))


def _cells(file: RepairedFile) -> tuple[str, ...]:
    nbytes = sum(stop - start for start, stop in file.ranges)
    replaced = "all" if nbytes == file.nbytes else decimal(nbytes)
    return file.file, file.source, f"{replaced} of {decimal(file.nbytes)}"


def _verdict(report: RepairReport) -> str:
    if not report.damages:
        return f"{report.location}: no damage found; nothing was changed."
    counts = f"{counted(len(report.damages), 'damage')}, {len(report.remaining)} left"
    if report.is_applied:
        return f"{report.location}: {counts}; {counted(len(report.files), 'file')} repaired."
    if not report.files:
        return f"{report.location}: {counts}; nothing can be repaired. Give a copy with --from."
    if report.remaining:
        return f"{report.location}: {counts}; nothing was changed. Give a copy with --from, or --partial."
    return f"{report.location}: {counts}; nothing was changed."
