"""`megackpt verify`: what is damaged in a checkpoint."""

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
from megackpt.options import VerifyOptions

if TYPE_CHECKING:
    from megackpt.engine.verification.verify import VerifyReport
    from megackpt.formats.damage import Damage


@click.command(name="verify", epilog=EXIT_CODES)
@click.argument("path", metavar="PATH")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@click.option("--threads", default=4, show_default=True, type=click.IntRange(1), help="Reads at once.")
@unsafe_pickle_option
@json_option
def command(path: str, *, deep: bool, threads: int, allow_unsafe_pickle: bool, as_json: bool) -> int:
    """Look for everything that is wrong with the checkpoint in the directory PATH. Nothing is changed.

    Without --deep only the structure: the commit, the index and its digest, that files are there and as long
    as they must be, that chunks lie in their files and cover every array exactly once; no bytes of tensors
    are read, so damage of these is not found. With it
    also the digest of every block, in bounded memory, and that objects and common state can be decoded. All
    damage is listed: file, bytes, key, chunk. Arrays that were saved with array_digests are compared as a
    whole, too.
    """
    from megackpt.engine.verification.verify import verify_checkpoint

    options = VerifyOptions(deep=deep, threads=threads, allow_unsafe_pickle=allow_unsafe_pickle)
    with contextlib.closing(opened_checkpoint(path)) as store, Bars(is_root=is_root()) as bars:
        found = verify_checkpoint(store, options, bars)
    if as_json:
        damages = [damage.to_json() for damage in found.damages]
        said = {**asdict(found), "damages": damages, "is_whole": found.is_whole}
        said["is_undamaged"] = found.is_undamaged
        del said["array_shares"]  # of one process that looks at all there are none
        say(said, "", as_json=True)
    else:
        _show(found)
    return 0 if found.is_undamaged else FAILED_CHECK


def _show(found: VerifyReport) -> None:
    if found.damages:
        columns = ("file", "bytes", "key", "chunk", "what is wrong")
        show(table_of(f"{found.location}: damaged", map(_cells, found.damages), left=columns))
    kind = f" {found.backend} version {found.version}," if found.backend else ""
    show(
        f"{found.location}: {_verdict(found)};{kind} {found.arrays} arrays and {found.objects} objects, "
        f"{decimal(found.nbytes)} in {found.chunks} chunks and {found.files} files."
    )
    if found.deep and found.array_digests:
        compared, stored = found.compared_array_digests, found.array_digests
        why = " Others are damaged, or the extra `digests` is not installed." if compared < stored else ""
        show(f"Of {stored} digests of whole arrays {compared} were compared.{why}")
    if found.unknown_values:
        show(
            f"{found.unknown_values} values (objects or common state) hold classes that are not known here: "
            f"they were read, and not decoded to these classes."
        )
    if found.deep and found.unchecked_nbytes:
        show(
            f"Of {decimal(found.unchecked_nbytes)} no digest is stored: that they can be read is all that is "
            f"known of them."
        )


def _verdict(found: VerifyReport) -> str:
    """Return what is known of the checkpoint, and no more than was checked."""
    if not found.deep:
        checked = "bytes not read, --deep reads them"
    else:
        checked = "every byte read, not all have digests" if found.unchecked_nbytes else "every byte read"
    if found.damages:
        return f"{len(found.damages)} damages ({checked})"
    return f"whole ({checked})" if found.is_whole else f"structure whole ({checked})"


def _cells(damage: Damage) -> tuple[str, ...]:
    bytes_of = "" if damage.start is None else f"{damage.start}:{damage.stop}"
    return damage.file, bytes_of, damage.key or "", damage.box or "", damage.what
