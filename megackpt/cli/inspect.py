"""`megackpt inspect`: the content of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import click
from rich.console import Group
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, note, print_json, unsafe_pickle_option, wants_json
from megackpt.cli.locations import checkpoint_location
from megackpt.cli.output import ProgressBars, counted, limited_table, show, table_of
from megackpt.ground.arguments import did_you_mean
from megackpt.plans.metadata import OBJECT

if TYPE_CHECKING:
    from megackpt.whole.inspect import CheckpointSummary


_NESTED = re.compile(r"[.\[]")
_GROUP = re.compile(r"(.*\bparam_groups[.\[]\d+\]?)(.+)")
_MAX_VALUE = 200  # characters of the value of a row


@click.command(name="inspect", epilog=EPILOG)
@click.argument("path", metavar="PATH")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only keys that match; repeatable.")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(0), help="Rows of each table; 0 for all."
)
@unsafe_pickle_option
def command(path: str, *, keys: tuple[str, ...], limit: int, allow_unsafe_pickle: bool) -> None:
    """Show the content of the checkpoint in the directory PATH, without reading a tensor.

    Step 100 of a run is ROOT/iter_0000100.

    Shows the commit; arrays and objects with dtype, shape, chunks and bytes; files; bytes by rank; common
    state. With --json all rows are printed.
    """
    with ProgressBars():
        from megackpt.whole.inspect import inspect

        summary = inspect(checkpoint_location(path), keys=keys, allow_unsafe_pickle=allow_unsafe_pickle)
    if keys and not summary.arrays:
        every = inspect(checkpoint_location(path), allow_unsafe_pickle=allow_unsafe_pickle)
        meant = "".join(did_you_mean(key, (array.key for array in every.arrays)) for key in keys[:1])
        raise click.UsageError(
            f"No key of {path} matches {', '.join(map(repr, keys))}. Leave --keys out to see all; a glob "
            f"matches whole keys, as '*weight*'.{meant}"
        )
    for pattern in keys:
        if not any(fnmatchcase(array.key, pattern) for array in summary.arrays):
            note(f"No key of {path} matches {pattern!r}.")
    if wants_json():
        print_json(asdict(summary))
        return
    show(*_tables(summary, limit))
    for key, why in summary.unreadable.items():
        show(f"{key!r} {why}.")
    for what in summary.left_out:
        show(f"Left out: {what}.")
    if summary.common_error:
        show(f"Common state cannot be read: {summary.common_error}")


def _tables(summary: CheckpointSummary, limit: int) -> Iterator[Group]:
    ranks = "" if summary.world_size is None else f", saved by {counted(summary.world_size, 'rank')}"
    nbytes = f"{decimal(summary.nbytes)} of chunks"
    title = f"{summary.location}: {summary.backend} version {summary.version}{ranks}, {nbytes}"
    fields = {name: value for name, value in summary.manifest.items() if not isinstance(value, dict)}
    yield table_of(title, [(name, str(value)) for name, value in sorted(fields.items())], left=("commit", ""))
    yield from _array_tables(summary, limit)
    yield from _file_tables(summary, limit)
    yield from _leaves("common state", summary.common, limit)
    yield from _leaves("content metadata", summary.content, limit)


def _array_tables(summary: CheckpointSummary, limit: int) -> Iterator[Group]:
    arrays = [a for a in summary.arrays if a.dtype != OBJECT]
    objects = [a for a in summary.arrays if a.dtype == OBJECT]
    rows: list[Sequence[str]]
    rows = [(a.key, a.dtype, str(list(a.shape)), str(a.chunks), decimal(a.nbytes)) for a in arrays]
    right: tuple[str, ...] = ("chunks", "bytes")
    if any(a.crc64nvme is not None for a in arrays):
        rows = [(*row, a.crc64nvme or "") for row, a in zip(rows, arrays, strict=True)]
        right = (*right, "crc64nvme")
    yield limited_table(counted(len(arrays), "array"), ("key", "dtype", "shape"), right, rows, limit)
    if objects:
        rows = [(a.key, str(list(a.shape)), str(a.chunks), decimal(a.nbytes)) for a in objects]
        title = f"{counted(len(objects), 'array')} of objects"
        yield limited_table(title, ("key", "shape"), ("objects", "bytes"), rows, limit)


def _file_tables(summary: CheckpointSummary, limit: int) -> Iterator[Group]:
    rows: list[Sequence[str]]
    if summary.files:
        rows = [
            (f.name, "" if f.rank is None else str(f.rank), str(f.chunks), decimal(f.nbytes))
            for f in summary.files
        ]
        title = f"{counted(len(summary.files), 'file')} with chunks"
        yield limited_table(title, ("file",), ("rank", "chunks", "bytes of chunks"), rows, limit)
    if summary.rank_nbytes:
        rows = [(str(rank), decimal(nbytes)) for rank, nbytes in summary.rank_nbytes.items()]
        yield limited_table("bytes by rank", (), ("rank", "bytes of chunks"), rows, limit)


def _leaves(title: str, leaves: Mapping[str, str], limit: int) -> Iterator[Group]:
    if leaves:
        yield limited_table(title, ("path", "value"), (), folded_leaves(leaves), limit)


def folded_leaves(leaves: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return leaves as rows: those of the top level first, and a row for each group of an optimizer.

    >>> folded_leaves({"a.b": "1", "o.param_groups.0.lr": "0.1", "o.param_groups.0.eps": "2", "step": "5"})
    [('step', '5'), ('a.b', '1'), ('o.param_groups.0', 'lr 0.1, eps 2')]
    """
    rows: dict[str, str] = {}
    for path, value in sorted(leaves.items(), key=lambda leaf: bool(_NESTED.search(leaf[0]))):
        group = _GROUP.match(path)
        if group is None:
            rows[path] = value
        else:
            member = f"{group.group(2).strip('.')} {value}"
            before = rows.get(group.group(1))
            rows[group.group(1)] = member if before is None else f"{before}, {member}"
    short = {path: value[:_MAX_VALUE] + "..." * (len(value) > _MAX_VALUE) for path, value in rows.items()}
    return list(short.items())
