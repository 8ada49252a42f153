"""`megackpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Group
from rich.filesize import decimal

from megackpt.cli.entry import EXIT_CODES, FAILED_CHECK, is_root, json_option, say, unsafe_pickle_option
from megackpt.cli.locations import opened_checkpoint
from megackpt.cli.progress import Bars
from megackpt.cli.tables import limited_table, natural, show
from megackpt.options import DiffOptions

if TYPE_CHECKING:
    from megackpt.maintenance.diff import ArrayDifference, CheckpointDifference


@click.command(name="diff", epilog=EXIT_CODES)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only keys that fit; may be repeated.")
@click.option("--no-common", is_flag=True, help="Leave common state and content metadata out.")
@click.option(
    "--sort",
    "order",
    type=click.Choice(["largest", "elements", "key"]),
    default="largest",
    show_default=True,
    help="Order of arrays with other elements: largest difference first, most elements first, or by key.",
)
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(0), help="Rows of each table; 0 for all."
)
@click.option("--read", "read_all", is_flag=True, help="Read all arrays, also those of equal digests.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1), help="Comparisons at once.")
@unsafe_pickle_option
@json_option
def command(
    first: str,
    second: str,
    *,
    keys: tuple[str, ...],
    no_common: bool,
    order: str,
    limit: int,
    read_all: bool,
    threads: int,
    allow_unsafe_pickle: bool,
    as_json: bool,
) -> int:
    """Compare the checkpoints in the directories A and B, of any formats, saved at any layouts.

    Keys, dtypes, shapes, every element, objects, and common state by path. Elements are equal if all their
    bits are. Both are read once, in bounded memory, and every block is checked against its digest; but arrays
    of which both checkpoints have a digest of the whole, saved with array_digests, are not read if these are
    equal. JSON has all rows, by key.
    """
    from megackpt.maintenance.diff import find_difference

    options = DiffOptions(
        keys=keys,
        common=not no_common,
        read_all=read_all,
        allow_unsafe_pickle=allow_unsafe_pickle,
        threads=threads,
    )
    with (
        contextlib.closing(opened_checkpoint(first)) as one,
        contextlib.closing(opened_checkpoint(second)) as two,
        Bars(is_root=is_root()) as bars,
    ):
        found = find_difference(one, two, options, bars)
    if keys and not (found.compared or found.only_first or found.only_second or found.declared):
        raise click.UsageError(f"No key of {first} or {second} fits {', '.join(map(repr, keys))}.")
    if as_json:
        said = {**asdict(found), "arrays": [_json_of(a) for a in found.arrays], "is_equal": found.is_equal}
        say({"first": first, "second": second, **said}, "", as_json=True)
    else:
        _show(found, order, limit)
    return 0 if found.is_equal else FAILED_CHECK


def _json_of(array: ArrayDifference) -> dict[str, object]:
    """Return a difference as JSON has it, which knows no infinity."""
    said = asdict(array)
    return said | {"largest": str(array.largest) if array.largest == float("inf") else array.largest}


def _show(found: CheckpointDifference, order: str, limit: int) -> None:
    show(*_tables(found, order, limit))
    verdict = "equal" if found.is_equal else f"different: {_totals(found)}"
    show(
        f"{verdict}; {found.compared} arrays and arrays of objects that both have were compared, "
        f"{decimal(found.nbytes)} of elements read of each."
    )
    if found.by_digest:
        show(
            f"{found.by_digest} arrays, {decimal(found.by_digest_nbytes)}, are equal by their digests; "
            f"nothing of them was read."
        )


def _totals(found: CheckpointDifference) -> str:
    """Return how much differs, of each kind that there is."""
    counted = [
        (len(found.only_first), "keys only in A"),
        (len(found.only_second), "keys only in B"),
        (len(found.declared), "keys of another dtype or shape"),
        (len(found.values), "other values"),
    ]
    parts = [f"{count} {what}" for count, what in counted if count]
    if found.arrays:
        elements = sum(array.elements for array in found.arrays)
        of = sum(math.prod(array.shape) for array in found.arrays)
        measured = [array for array in found.arrays if array.largest is not None]
        worst = max(measured, key=lambda array: array.largest or 0.0, default=None)
        largest = "" if worst is None else f", by {worst.largest:.6g} at most, in {worst.key!r}"
        parts.insert(0, f"{elements:,} of {of:,} elements of {len(found.arrays)} arrays{largest}")
    return "; ".join(parts)


def _ordered(arrays: Sequence[ArrayDifference], order: str) -> list[ArrayDifference]:
    """Return arrays in the order that was asked for; with `largest`, those with NaNs come first."""
    by_key = sorted(arrays, key=lambda array: natural(array.key))
    if order == "key":
        return by_key
    if order == "elements":
        return sorted(by_key, key=lambda array: -array.elements)
    return sorted(by_key, key=lambda a: (not a.not_numbers, -(a.largest or 0.0), -a.elements))


def _tables(found: CheckpointDifference, order: str, limit: int) -> Iterator[Group]:
    lacking = [(key, "A") for key in found.only_first] + [(key, "B") for key in found.only_second]
    if lacking:
        rows: list[Sequence[str]] = sorted(lacking, key=lambda row: natural(row[0]))
        yield limited_table(f"{len(rows)} keys in one of them only", ("key", "in"), (), rows, limit)
    if found.declared:
        rows = [(key, *found.declared[key]) for key in sorted(found.declared, key=natural)]
        title = f"{len(rows)} keys of another dtype or shape"
        yield limited_table(title, ("key", "A", "B"), (), rows, limit)
    if found.arrays:
        right = ("elements", "of", "first at", "largest difference", "no number")
        rows = [_cells(array) for array in _ordered(found.arrays, order)]
        title = f"{len(rows)} arrays with other elements"
        yield limited_table(title, ("key", "dtype", "shape"), right, rows, limit)
    if found.values:
        values = sorted(found.values, key=lambda value: natural(value.place))
        rows = [(v.place, v.first or "(nothing)", v.second or "(nothing)") for v in values]
        yield limited_table(f"{len(rows)} other values", ("where", "A", "B"), (), rows, limit)


def _cells(array: ArrayDifference) -> tuple[str, ...]:
    largest = "" if array.largest is None else f"{array.largest:.6g}"
    return (
        array.key,
        array.dtype,
        str(list(array.shape)),
        str(array.elements),
        str(math.prod(array.shape)),
        str(list(array.first)),
        largest,
        str(array.not_numbers or ""),
    )
