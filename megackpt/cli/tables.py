"""Tables on stdout, for the commands that look into checkpoints.

Keys are free text from files: what would move the cursor is escaped. On a terminal, keys too long for
their column wrap at dots and follow the table in full, each on a line of its own, to be copied. Elsewhere
nothing wraps: a row is a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 1 << 20  # columns of a table that goes to a file: as many as it needs
_NUMBER = re.compile(r"([0-9]+)")
_LEAST_WIDTH = 16  # of a column of keys, in characters


def stdout() -> Console:
    """Return the console to print on."""
    return Console(
        width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False, emoji=False
    )


def show(*tables: RenderableType) -> None:
    """Print tables; keys in full may be longer than a line of the terminal, which wraps them itself."""
    console = stdout()
    for table in tables:
        console.print(table, crop=False)


def table_of(
    title: str, rows: Iterable[Sequence[str]], *, left: Sequence[str], right: Sequence[str] = ()
) -> Group:
    """Return a table of plain text below its title; the columns of text come first, then those of numbers."""
    table = Table()
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    wrapped: dict[str, None] = {}
    for row in rows:
        cells = [_printable(cell) for cell in row]
        keys: list[RenderableType] = [_Key(cell, wrapped) for cell in cells[: len(left)]]
        table.add_row(*keys, *map(Text, cells[len(left) :]))
    return Group(Text(_printable(title)), table, _InFull(wrapped))


def limited_table(
    title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]], limit: int
) -> Group:
    """Return a table of the first rows, whose title says so; of all for a limit of 0."""
    shown = rows[:limit] if limit else rows
    more = f", the first {limit}" if len(shown) < len(rows) else ""
    return table_of(f"{title}{more}", shown, left=left, right=right)


def natural(key: str) -> list[tuple[int, str]]:
    """Return what sorts keys so that numbers in them are in order.

    >>> sorted(["layers.10", "layers.2"], key=natural)
    ['layers.2', 'layers.10']
    """
    return [(int(part) if part.isdecimal() else -1, part) for part in _NUMBER.split(key)]


class _Key:
    """Text that wraps at dots and slashes, and notes in `wrapped` that it did."""

    def __init__(self, text: str, wrapped: dict[str, None]) -> None:
        self._text, self._wrapped = text, wrapped

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = Text(self._text).cell_len
        return Measurement(min(length, _LEAST_WIDTH), length).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Text(self._text).cell_len <= options.max_width:
            yield Text(self._text)
            return
        if " " not in self._text:
            self._wrapped[self._text] = None
            yield Text("\n".join(_lines(self._text, options.max_width)), overflow="fold")
        else:  # a sentence
            yield Text(self._text, overflow="fold")


class _InFull:
    """Keys that a table above has wrapped, a line each."""

    def __init__(self, wrapped: dict[str, None]) -> None:
        self._wrapped = wrapped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text in self._wrapped:
            yield Text(text, no_wrap=True, overflow="ignore")


def _lines(key: str, width: int) -> list[str]:
    """Cut a key into lines, behind dots and slashes where a part fits into a line.

    >>> _lines("decoder.layers.3.mlp", 10)
    ['decoder.', 'layers.3.', 'mlp']
    """
    lines = [""]
    for part in key.replace(".", ".\0").replace("/", "/\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _printable(text: str) -> str:
    """Return text without what would move the cursor, or worse: keys may come from a stranger's file."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
