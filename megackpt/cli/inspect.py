"""`megackpt inspect`: what a checkpoint holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Group
from rich.filesize import decimal

from megackpt.cli.entry import EXIT_CODES, json_option, say, unsafe_pickle_option
from megackpt.cli.locations import opened_checkpoint
from megackpt.cli.tables import limited_table, show, table_of
from megackpt.metadata import OBJECT

if TYPE_CHECKING:
    from megackpt.maintenance.inspect import CheckpointSummary


@click.command(name="inspect", epilog=EXIT_CODES)
@click.argument("path", metavar="PATH")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only keys that fit; may be repeated.")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(0), help="Rows of each table; 0 for all."
)
@unsafe_pickle_option
@json_option
def command(
    path: str, *, keys: tuple[str, ...], limit: int, allow_unsafe_pickle: bool, as_json: bool
) -> None:
    """Show what the checkpoint in the directory PATH holds, without reading a tensor.

    Its commit, arrays and objects with dtype, shape, chunks and bytes, files, bytes by rank, common state.
    JSON has all rows.
    """
    from megackpt.maintenance.inspect import inspect_checkpoint

    with contextlib.closing(opened_checkpoint(path)) as store:
        found = inspect_checkpoint(store, keys=keys, allow_unsafe_pickle=allow_unsafe_pickle)
    if as_json:
        say(asdict(found), "", as_json=True)
        return
    show(*_tables(found, limit))
    for key, why in found.unreadable.items():
        show(f"{key!r} {why}.")
    if found.common_fault:
        show(f"Common state cannot be read: {found.common_fault}")


def _tables(found: CheckpointSummary, limit: int) -> Iterator[Group]:
    ranks = "" if found.world_size is None else f", saved by {found.world_size} ranks"
    title = f"{found.location}: {found.backend} version {found.version}{ranks}, {decimal(found.nbytes)}"
    said = {name: value for name, value in found.manifest.items() if not isinstance(value, dict)}
    yield table_of(title, [(name, str(value)) for name, value in sorted(said.items())], left=("commit", ""))
    arrays = [a for a in found.arrays if a.dtype != OBJECT]
    objects = [a for a in found.arrays if a.dtype == OBJECT]
    rows: list[Sequence[str]]
    rows = [(a.key, a.dtype, str(list(a.shape)), str(a.chunks), decimal(a.nbytes)) for a in arrays]
    right: tuple[str, ...] = ("chunks", "bytes")
    if any(a.crc64nvme is not None for a in arrays):
        rows = [(*row, a.crc64nvme or "") for row, a in zip(rows, arrays, strict=True)]
        right = (*right, "crc64nvme")
    yield limited_table(f"{len(arrays)} arrays", ("key", "dtype", "shape"), right, rows, limit)
    if objects:
        rows = [(a.key, str(list(a.shape)), str(a.chunks), decimal(a.nbytes)) for a in objects]
        title = f"{len(objects)} arrays of objects"
        yield limited_table(title, ("key", "shape"), ("objects", "bytes"), rows, limit)
    if found.files:
        rows = [
            (f.name, "" if f.rank is None else str(f.rank), str(f.chunks), decimal(f.nbytes))
            for f in found.files
        ]
        title = f"{len(found.files)} files with chunks"
        yield limited_table(title, ("file",), ("rank", "chunks", "bytes of chunks"), rows, limit)
    if found.rank_nbytes:
        rows = [(str(rank), decimal(nbytes)) for rank, nbytes in found.rank_nbytes.items()]
        yield limited_table("bytes by rank", (), ("rank", "bytes of chunks"), rows, limit)
    yield from _leaves("common state", found.common, limit)
    yield from _leaves("content metadata", found.content, limit)


def _leaves(title: str, leaves: Mapping[str, str], limit: int) -> Iterator[Group]:
    if leaves:
        yield limited_table(title, ("path", "value"), (), list(leaves.items()), limit)
