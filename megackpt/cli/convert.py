"""`megackpt convert`: write a checkpoint in another format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import EXIT_CODES, json_option, print_result, unsafe_pickle_option
from megackpt.cli.locations import checkpoint_location
from megackpt.cli.progress import ByteBars

if TYPE_CHECKING:
    from megackpt.comm import Group

_TIMEOUT_S = 600.0


@click.command(name="convert", epilog=EXIT_CODES)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to",
    "name",
    required=True,
    metavar="FORMAT[:VERSION]",
    help="The new format: megackpt, torch_dist, zarr, or that of a package; by default its newest version.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint of the same format at DST.")
@click.option("--array-digests", is_flag=True, help="Store a digest of each array (format megackpt only).")
@click.option("--no-verify", is_flag=True, help="Do not read the new checkpoint again to compare it.")
@unsafe_pickle_option
@json_option
def command(
    source: str,
    target: str,
    name: str,
    *,
    overwrite: bool,
    array_digests: bool,
    no_verify: bool,
    allow_unsafe_pickle: bool,
    as_json: bool,
) -> None:
    """Write a copy of the checkpoint in the directory SRC, in another format, to the directory DST.

    The format of SRC is detected; a Hugging Face folder is read, too. Chunks are streamed through small
    buffers and are not resharded; no GPU and no model is needed. DST becomes a checkpoint in one step, and is
    then compared with SRC byte by byte. If anything fails, DST is not a checkpoint. To use several processes:

    torchrun --nproc-per-node 4 -m megackpt.cli convert SRC DST --to FORMAT
    """
    from megackpt.maintenance.convert import convert

    to = _format(name)
    with _torchrun_group() as group, ByteBars() as bars:
        report = convert(
            checkpoint_location(source),
            target,
            to,
            verify=not no_verify,
            overwrite=overwrite,
            array_digests=array_digests,
            allow_unsafe_pickle=allow_unsafe_pickle,
            timeout_s=_TIMEOUT_S,
            group=group,
            progress=bars,
        )
    checked = "read again and equal" if report.is_verified else "not verified"
    print_result(
        {"source": source, "target": target, **asdict(report)},
        f"{target}: {report.arrays} arrays and {report.objects} objects, {decimal(report.nbytes)} in "
        f"{report.chunks} chunks, as {report.backend} version {report.version}; {checked}.",
        as_json=as_json,
    )


def _format(name: str) -> str | tuple[str, int]:
    backend, colon, version = name.partition(":")
    if not colon:
        return backend
    if not version.isdecimal():
        raise click.BadParameter(
            f"{version!r} is not a version; give a number, as in zarr:3.", param_hint="--to"
        )
    return backend, int(version)


@contextmanager
def _torchrun_group() -> Iterator[Group | None]:
    """Connect the ranks that torchrun has started, for a block of code; None if this process is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield None
        return
    import torch.distributed as dist

    from megackpt.comm import world_group

    dist.init_process_group("gloo")
    try:
        group = world_group(timeout_s=_TIMEOUT_S)
        yield group
        group.all_gather(b"")  # no rank closes connections that another still needs
    finally:
        dist.destroy_process_group()
