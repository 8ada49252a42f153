"""`megackpt diff`: the differences between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Group
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, FAILED_CHECK, print_json, unsafe_pickle_option, wants_json
from megackpt.cli.locations import checkpoint_location
from megackpt.cli.output import ProgressBars, limited_table, natural, show

if TYPE_CHECKING:
    from megackpt.whole.diff import CheckpointDifference
    from megackpt.whole.diff_arrays import ArrayDifference


@click.command(name="diff", epilog=EPILOG)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only keys that match; repeatable.")
@click.option("--no-common", is_flag=True, help="Leave common state and content metadata out.")
@click.option(
    "--sort",
    "order",
    type=click.Choice(["largest", "elements", "key"]),
    default="largest",
    show_default=True,
    help="Order of arrays that differ: largest difference first, most elements first, or by key.",
)
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(0), help="Rows of each table; 0 for all."
)
@click.option("--read", "read_all", is_flag=True, help="Read all arrays, also those of equal digests.")
@unsafe_pickle_option
def command(
    first: str,
    second: str,
    *,
    keys: tuple[str, ...],
    no_common: bool,
    order: str,
    limit: int,
    read_all: bool,
    allow_unsafe_pickle: bool,
) -> int:
    """Compare the checkpoints in the directories A and B, of any formats, saved at any layouts.

    Compares keys, dtypes, shapes, every element, objects, and common state by path. Elements are equal if
    all their bits are equal. Both checkpoints are read once, in limited memory, and every block is checked
    against its digest. If both checkpoints store a digest of a whole array (saved with array_digests) and
    these digests are equal, the array is not read. With --json all rows are printed, by key.
    """
    with ProgressBars() as bars:
        from megackpt.whole.diff import diff

        locations = checkpoint_location(first), checkpoint_location(second)
        difference = diff(
            *locations,
            keys=keys,
            common=not no_common,
            read_all=read_all,
            allow_unsafe_pickle=allow_unsafe_pickle,
            progress=bars,
        )
    has_keys = difference.compared or difference.only_first or difference.only_second or difference.declared
    if keys and not has_keys:
        raise click.UsageError(
            f"No key of {first} or {second} matches {', '.join(map(repr, keys))}. Leave --keys out to "
            f"compare all; a glob matches whole keys, as '*weight*'."
        )
    if wants_json():
        result = asdict(difference) | {"arrays": [_to_json(array) for array in difference.arrays]}
        print_json({"first": first, "second": second, "is_equal": difference.is_equal, **result})
    else:
        _show(difference, order, limit)
    return 0 if difference.is_equal else FAILED_CHECK


def _to_json(array: ArrayDifference) -> dict[str, object]:
    """Return a difference for JSON, which has no infinity."""
    is_infinite = array.largest == math.inf
    return asdict(array) | {"largest": str(array.largest) if is_infinite else array.largest}


def _show(difference: CheckpointDifference, order: str, limit: int) -> None:
    show(*_tables(difference, order, limit))
    verdict = "equal" if difference.is_equal else f"different: {_totals(difference)}"
    show(
        f"{verdict}; {difference.compared} arrays and arrays of objects that both have were compared, "
        f"{decimal(difference.nbytes)} of elements read of each."
    )
    if difference.by_digest:
        show(
            f"{difference.by_digest} arrays, {decimal(difference.by_digest_nbytes)}, are equal by their "
            f"digests and were not read."
        )


def _totals(difference: CheckpointDifference) -> str:
    """Return how much differs, by kind."""
    counts = [
        (len(difference.only_first), "keys only in A"),
        (len(difference.only_second), "keys only in B"),
        (len(difference.declared), "keys with another dtype or shape"),
        (len(difference.values), "other values"),
    ]
    texts = [f"{count} {what}" for count, what in counts if count]
    if difference.arrays:
        elements = sum(array.elements for array in difference.arrays)
        total = sum(math.prod(array.shape) for array in difference.arrays)
        measured = [array for array in difference.arrays if array.largest is not None]
        worst = max(measured, key=lambda array: array.largest or 0.0, default=None)
        largest = "" if worst is None else f", by {worst.largest:.6g} at most, in {worst.key!r}"
        texts.insert(0, f"{elements:,} of {total:,} elements of {len(difference.arrays)} arrays{largest}")
    return "; ".join(texts)


def _sorted(arrays: Sequence[ArrayDifference], order: str) -> list[ArrayDifference]:
    """Return arrays in the order of --sort; with `largest`, those with NaNs come first."""
    by_key = sorted(arrays, key=lambda array: natural(array.key))
    if order == "key":
        return by_key
    if order == "elements":
        return sorted(by_key, key=lambda array: -array.elements)
    return sorted(by_key, key=lambda a: (not a.nan_elements, -(a.largest or 0.0), -a.elements))


def _tables(difference: CheckpointDifference, order: str, limit: int) -> Iterator[Group]:
    one_sided = [(key, "A") for key in difference.only_first]
    one_sided += [(key, "B") for key in difference.only_second]
    if one_sided:
        rows: list[Sequence[str]] = sorted(one_sided, key=lambda row: natural(row[0]))
        yield limited_table(f"{len(rows)} keys in one of them only", ("key", "in"), (), rows, limit)
    if difference.declared:
        rows = [(key, *difference.declared[key]) for key in sorted(difference.declared, key=natural)]
        title = f"{len(rows)} keys with another dtype or shape"
        yield limited_table(title, ("key", "A", "B"), (), rows, limit)
    if difference.arrays:
        right = ("elements", "of", "first at", "largest difference", "NaN")
        rows = [_cells(array) for array in _sorted(difference.arrays, order)]
        title = f"{len(rows)} arrays with other elements"
        yield limited_table(title, ("key", "dtype", "shape"), right, rows, limit)
    if difference.values:
        values = sorted(difference.values, key=lambda value: natural(value.path))
        rows = [(v.path, v.first or "(nothing)", v.second or "(nothing)") for v in values]
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
        str(array.nan_elements or ""),
    )
