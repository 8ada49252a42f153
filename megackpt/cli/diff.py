"""`megackpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.console import Group
from rich.filesize import decimal

from megackpt.cli.frame import EXIT_CODES, FAILED_CHECK, is_root, json_option, say, unsafe_pickle_option
from megackpt.cli.places import checkpoint_store
from megackpt.cli.progress import Bars
from megackpt.cli.tables import stdout, table_of
from megackpt.engine.integrity.difference import ArrayDifference, Difference, find_difference
from megackpt.options import DiffOptions


@click.command(name="diff", short_help="Compare two checkpoints, bit by bit.", epilog=EXIT_CODES)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only keys that fit; may be repeated.")
@click.option("--no-common", is_flag=True, help="Leave common state and content metadata out.")
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
    read_all: bool,
    threads: int,
    allow_unsafe_pickle: bool,
    as_json: bool,
) -> int:
    """Compare the checkpoints in the directories A and B, of any formats, saved at any layouts.

    Keys, dtypes, shapes, every element, objects, and common state by path. Elements are equal if all their
    bits are. Both are read once, in bounded memory, and every block is checked against its digest; but arrays
    of which both checkpoints have a digest of the whole, saved with array_digests, are not read if these are
    equal.
    """
    options = DiffOptions(
        keys=keys,
        common=not no_common,
        read_all=read_all,
        allow_unsafe_pickle=allow_unsafe_pickle,
        threads=threads,
    )
    with (
        contextlib.closing(checkpoint_store(first)) as one,
        contextlib.closing(checkpoint_store(second)) as two,
        Bars(is_root=is_root()) as bars,
    ):
        found = find_difference(one, two, options, bars)
    if keys and not (found.compared or found.only_first or found.only_second or found.declared):
        raise click.UsageError(f"No key of {first} or {second} fits {', '.join(map(repr, keys))}.")
    if as_json:
        said = {**asdict(found), "arrays": [_json_of(a) for a in found.arrays], "is_equal": found.is_none}
        say({"first": first, "second": second, **said}, "", as_json=True)
    else:
        _show(found)
    return 0 if found.is_none else FAILED_CHECK


def _json_of(array: ArrayDifference) -> dict[str, object]:
    """Return a difference as JSON has it, which knows no infinity."""
    said = asdict(array)
    return said | {"largest": str(array.largest) if array.largest == float("inf") else array.largest}


def _show(found: Difference) -> None:
    console = stdout()
    for table in _tables(found):
        console.print(table)
    verdict = "equal" if found.is_none else "different"
    console.print(
        f"{verdict}; {found.compared} arrays and arrays of objects that both have were compared, "
        f"{decimal(found.nbytes)} of elements read of each."
    )
    if found.by_digest:
        console.print(
            f"{found.by_digest} arrays, {decimal(found.by_digest_nbytes)}, are equal by their digests; "
            f"nothing of them was read."
        )


def _tables(found: Difference) -> Iterator[Group]:
    lacking = [(key, "A") for key in found.only_first] + [(key, "B") for key in found.only_second]
    if lacking:
        yield table_of("in one of them only", sorted(lacking), left=("key", "in"))
    if found.declared:
        rows = [(key, *said) for key, said in found.declared.items()]
        yield table_of("of another dtype or shape", rows, left=("key", "A", "B"))
    if found.arrays:
        columns = ("elements", "of", "first at", "largest difference", "no number")
        cells = map(_cells, found.arrays)
        yield table_of("other elements", cells, left=("key", "dtype", "shape"), right=columns)
    if found.values:
        rows = [(v.place, v.first or "(nothing)", v.second or "(nothing)") for v in found.values]
        yield table_of("other values", rows, left=("where", "A", "B"))


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
