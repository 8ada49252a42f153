"""`megackpt verify`: the damage of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, FAILED_CHECK, print_json, unsafe_pickle_option, wants_json
from megackpt.cli.locations import checkpoint_location
from megackpt.cli.output import ProgressBars, counted, show, table_of
from megackpt.formats.registry import is_foreign

if TYPE_CHECKING:
    from megackpt.engine.verification.verify import VerifyReport
    from megackpt.formats.damage import Damage


@click.command(name="verify", epilog=EPILOG)
@click.argument("path", metavar="PATH")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@click.option("--all", "all_steps", is_flag=True, help="Verify all steps of the run in PATH.")
@unsafe_pickle_option
def command(path: str, *, deep: bool, all_steps: bool, allow_unsafe_pickle: bool) -> int:
    """Find all damage of the checkpoint in the directory PATH. Nothing is changed.

    Without --deep the structure is checked: the commit, the index and its digest, that every file exists
    with the right length, that every chunk is inside its file, and that chunks cover every array
    exactly once. No bytes of tensors are read, so damage in them is not found.

    With --deep every byte is also read, in limited memory, and compared with its digest; objects and
    common state are decoded. Arrays that were saved with array_digests are also compared as a whole.

    All damage is listed, with file, bytes, key and chunk.

    With --all, PATH is the root of a run. Each step is a row: whole, undamaged (in what was checked),
    damaged, incomplete or unreadable, and whether parity files repair it. The column `chunks` has the bytes
    of arrays and objects. The last line names the newest good step.
    """
    if all_steps:
        return _verify_all(path, deep, allow_unsafe_pickle)
    with ProgressBars() as bars:
        from megackpt.whole.verify import verify

        location = checkpoint_location(path)
        report = verify(location, deep=deep, allow_unsafe_pickle=allow_unsafe_pickle, progress=bars)
    if wants_json():
        damages = [damage.to_json() for damage in report.damages]
        verdict = {"is_whole": report.is_whole, "is_undamaged": report.is_undamaged}
        print_json({**asdict(report), **verdict, "damages": damages})
    else:
        _show(report)
    return 0 if report.is_undamaged else FAILED_CHECK


def _verify_all(path: str, deep: bool, allow_unsafe_pickle: bool) -> int:
    with ProgressBars("reading the steps") as bars:
        from megackpt.cli.verify_steps import show_steps, steps_as_json, verify_steps
        from megackpt.options import VerifyOptions

        options = VerifyOptions(deep=deep, allow_unsafe_pickle=allow_unsafe_pickle)
        verdicts, latest = verify_steps(path, options, bars)
    if wants_json():
        print_json(steps_as_json(path, verdicts, latest))
    else:
        show_steps(path, verdicts, latest, deep=deep)
    is_clean = all(verdict.is_good or verdict.state == "incomplete" for verdict in verdicts)
    return 0 if is_clean and any(verdict.is_good for verdict in verdicts) else FAILED_CHECK


def _show(report: VerifyReport) -> None:
    if report.damages:
        columns = ("file", "bytes", "key", "chunk", "what is wrong")
        show(table_of(f"{report.location}: damaged", map(_cells, report.damages), left=columns))
    kind = f" {report.backend} version {report.version}," if report.backend else ""
    show(
        f"{report.location}: {_verdict(report)};{kind} {counted(report.arrays, 'array')} and "
        f"{counted(report.objects, 'object')}, {decimal(report.nbytes)} in {counted(report.chunks, 'chunk')} "
        f"and {counted(report.files, 'file')}."
    )
    if report.damages:
        repair = "" if is_foreign(report.backend) else f"`megackpt repair {report.location}`, or "
        show(f"Next: {repair}load another checkpoint.")
    if report.deep and report.array_digests:
        compared, stored = report.compared_array_digests, report.array_digests
        why = " Others are damaged, or the extra `digests` is not installed." if compared < stored else ""
        show(f"{compared} of {stored} digests of whole arrays were compared.{why}")
    if report.unknown_values:
        show(
            f"{report.unknown_values} values (objects or common state) have classes that are not known here. "
            f"They were read, and not decoded to instances of these classes."
        )
    if report.deep and report.unchecked_nbytes:
        every = report.unchecked_nbytes == report.nbytes
        how_many = "None of the bytes has a" if every else f"{decimal(report.unchecked_nbytes)} have no"
        show(f"{how_many} stored digest: they can be read, but may have changed.")


def _verdict(report: VerifyReport) -> str:
    """Return the verdict on the checkpoint, and what was checked."""
    if not report.deep:
        checked = "bytes not read, --deep reads them"
    else:
        checked = "every byte read"
        if report.unchecked_nbytes:
            has_none = report.unchecked_nbytes == report.nbytes
            checked += ", none has a digest" if has_none else ", not all have digests"
    if report.damages:
        return f"{counted(len(report.damages), 'damage')} ({checked})"
    return f"whole ({checked})" if report.is_whole else f"structure whole ({checked})"


def _cells(damage: Damage) -> tuple[str, ...]:
    byte_range = "" if damage.start is None else f"{damage.start}:{damage.stop}"
    return damage.file, byte_range, damage.key or "", damage.box or "", damage.what
