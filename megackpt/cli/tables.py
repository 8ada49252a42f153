"""Tables on stdout.

Keys are text from files of any origin, so characters that move the cursor are escaped. On a terminal, a key
that is too long for its column wraps at dots, and is repeated on one line below the table, to be copied. In a
file or pipe nothing wraps: a row is a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 1 << 20  # characters of a line in a file: more than any table needs
_NUMBER = re.compile(r"([0-9]+)")
_MIN_KEY_WIDTH = 16  # characters


def stdout() -> Console:
    """Return the console to print on."""
    return Console(
        width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False, emoji=False
    )


def show(*tables: RenderableType) -> None:
    """Print tables. Repeated keys may be longer than a line of the terminal, which wraps them itself."""
    console = stdout()
    for table in tables:
        console.print(table, crop=False)


def table_of(
    title: str, rows: Iterable[Sequence[str]], *, left: Sequence[str], right: Sequence[str] = ()
) -> Group:
    """Return a table of plain text with a title; left are columns of text, right are columns of numbers."""
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
    return Group(Text(_printable(title)), table, _WrappedKeys(wrapped))


def limited_table(
    title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]], limit: int
) -> Group:
    """Return a table of the first rows, with a title that says so; of all rows if limit is 0."""
    shown = rows[:limit] if limit else rows
    more = f", the first {limit}" if len(shown) < len(rows) else ""
    return table_of(f"{title}{more}", shown, left=left, right=right)


def natural(key: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in keys are in order.

    >>> sorted(["layers.10", "layers.2"], key=natural)
    ['layers.2', 'layers.10']
    """
    return [(int(part) if part.isdecimal() else -1, part) for part in _NUMBER.split(key)]


class _Key:
    """A cell that wraps at dots and slashes, and adds its text to `wrapped` if it does."""

    def __init__(self, text: str, wrapped: dict[str, None]) -> None:
        self._text, self._wrapped = text, wrapped

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = Text(self._text).cell_len
        return Measurement(min(length, _MIN_KEY_WIDTH), length).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Text(self._text).cell_len <= options.max_width:
            yield Text(self._text)
            return
        if " " not in self._text:
            self._wrapped[self._text] = None
            yield Text("\n".join(_lines(self._text, options.max_width)), overflow="fold")
        else:  # a sentence
            yield Text(self._text, overflow="fold")


class _WrappedKeys:
    """The keys that the table above has wrapped, a line for each."""

    def __init__(self, wrapped: dict[str, None]) -> None:
        self._wrapped = wrapped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text in self._wrapped:
            yield Text(text, no_wrap=True, overflow="ignore")


def _lines(key: str, width: int) -> list[str]:
    """Cut a key into lines after dots and slashes; a part that is longer than a line stays whole.

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
    """Return text with characters escaped that move the cursor or control the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
