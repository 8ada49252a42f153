"""`megackpt repair`: what is damaged in a checkpoint, from parity or copies."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import EXIT_CODES, FAILED_CHECK, is_root, json_option, say, unsafe_pickle_option
from megackpt.cli.locations import opened_checkpoint
from megackpt.cli.progress import Bars
from megackpt.cli.tables import show, table_of
from megackpt.options import RepairOptions

if TYPE_CHECKING:
    from megackpt.maintenance.repair import RepairReport
    from megackpt.maintenance.repair_search import RepairedFile


@click.command(name="repair", epilog=EXIT_CODES)
@click.argument("path", metavar="PATH")
@click.option(
    "--from", "copies", metavar="OTHER", multiple=True, help="A copy of the same save; may be given again."
)
@click.option("--dry-run", is_flag=True, help="Say what can be mended, and change nothing.")
@click.option("--partial", is_flag=True, help="Mend what can be, also if other damage stays.")
@click.option("--threads", default=4, show_default=True, type=click.IntRange(1), help="Reads at once.")
@unsafe_pickle_option
@json_option
def command(
    path: str,
    *,
    copies: tuple[str, ...],
    dry_run: bool,
    partial: bool,
    threads: int,
    allow_unsafe_pickle: bool,
    as_json: bool,
) -> int:
    """Mend the checkpoint in the directory PATH.

    Every byte is read. Damaged and lost files are computed from parity files, if the checkpoint was saved
    with them, or taken from copies; each is written beside the old one, verified, and then takes its place
    at once. If anything is damaged that cannot be mended, nothing is changed, unless --partial is given. Not
    while a job saves to the same directory.

    Exit code 0: the checkpoint is whole, or with --dry-run can be made whole; 1: damage stays.
    """
    from megackpt.maintenance.repair import repair_checkpoint

    if not is_root():
        return 0  # under torchrun one process repairs
    options = RepairOptions(
        dry_run=dry_run, partial=partial, threads=threads, allow_unsafe_pickle=allow_unsafe_pickle
    )
    with contextlib.ExitStack() as stack:
        store, *others = [
            stack.enter_context(contextlib.closing(opened_checkpoint(place, takes_latest=False)))
            for place in (path, *copies)
        ]
        bars = stack.enter_context(Bars(is_root=is_root()))
        found = repair_checkpoint(store, others, options, bars)
    if as_json:
        said = {
            "location": found.location,
            "is_whole": found.is_whole,
            "is_done": found.is_done,
            "damages": [damage.to_json() for damage in found.damages],
            "files": [asdict(file) for file in found.files],
            "remaining": [damage.to_json() for damage in found.remaining],
            "refusals": list(found.refusals),
        }
        say(said, "", as_json=True)
    else:
        _show(found)
    return 0 if found.is_whole else FAILED_CHECK


def _show(found: RepairReport) -> None:
    if found.files:
        title = f"{found.location}: {'mended' if found.is_done else 'can be mended'}"
        columns = ("file", "from", "bytes")
        show(table_of(title, map(_cells, found.files), left=columns))
    if found.remaining:
        rows = ((d.file, d.key or "", d.what) for d in found.remaining)
        show(table_of("What stays damaged", rows, left=("file", "key", "what is wrong")))
        for refusal in found.refusals:
            show(f"Of no use: {' '.join(refusal.split())}")
    show(_verdict(found))


def _cells(file: RepairedFile) -> tuple[str, ...]:
    nbytes = sum(stop - start for start, stop in file.ranges)
    shown = "all" if nbytes == file.nbytes else decimal(nbytes)
    return file.file, file.source, f"{shown} of {decimal(file.nbytes)}"


def _verdict(found: RepairReport) -> str:
    if not found.damages:
        return f"{found.location}: no damage found; nothing was changed."
    counted = f"{len(found.damages)} damages, {len(found.remaining)} of which stay"
    if found.is_done:
        return f"{found.location}: {counted}; {len(found.files)} files were mended."
    if not found.files:
        return f"{found.location}: {counted}; nothing can be mended. Give a copy with --from."
    if found.remaining:
        return f"{found.location}: {counted}; nothing was changed. Give a copy with --from, or --partial."
    return f"{found.location}: {counted}; nothing was changed."
