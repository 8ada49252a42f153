"""`megackpt convert`: a checkpoint in another format."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.filesize import decimal

from megackpt.cli.entry import EXIT_CODES, is_root, json_option, say, unsafe_pickle_option
from megackpt.cli.locations import opened_checkpoint
from megackpt.cli.progress import Bars
from megackpt.formats.registry import save_strategy
from megackpt.options import ConvertOptions
from megackpt.storage import open_store


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
    """Write the checkpoint in the directory SRC once more, in another format, to the directory DST.

    The format of SRC is detected. Chunks are streamed through small buffers and keep the cuts that they have;
    no GPU and no model is needed. DST becomes a checkpoint all at once, and is compared with SRC afterwards,
    byte by byte; if anything fails there is none. To use several processes:

    torchrun --nproc-per-node 4 -m megackpt.cli convert SRC DST --to FORMAT
    """
    from megackpt.cli.ranks import taking_part
    from megackpt.maintenance.convert import convert_checkpoint

    options = ConvertOptions(
        verify=not no_verify,
        overwrite=overwrite,
        array_digests=array_digests,
        allow_unsafe_pickle=allow_unsafe_pickle,
    )
    strategy = save_strategy(_choice(name))
    with (
        taking_part(timeout_s=options.timeout_s) as group,
        Bars(is_root=is_root()) as bars,
    ):
        stores = opened_checkpoint(source), open_store(target)
        done = convert_checkpoint(*stores, strategy, group, options, bars)
    result = {
        "source": source,
        "target": target,
        "backend": strategy.backend,
        "version": strategy.version,
        **asdict(done),
    }
    say(
        result,
        f"{target}: {done.arrays} arrays and {done.objects} objects, {decimal(done.nbytes)} in {done.chunks} "
        f"chunks, as {strategy.backend} version {strategy.version}; "
        f"{'read again and equal' if done.verified else 'not verified'}.",
        as_json=as_json,
    )


def _choice(name: str) -> str | tuple[str, int]:
    backend, colon, version = name.partition(":")
    if not colon:
        return backend
    if not version.isdecimal():
        raise click.BadParameter(
            f"{version!r} is no version; give a number, as in zarr:3.", param_hint="--to"
        )
    return backend, int(version)
