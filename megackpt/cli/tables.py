"""Tables on stdout, for the commands that look into checkpoints.

Owns what a cell may do to the terminal: keys are free text, and are printed as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 160  # columns of a table that goes to a file


def stdout() -> Console:
    """Return the console to print on."""
    return Console(
        width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False, emoji=False
    )


def table_of(
    title: str, rows: Iterable[Sequence[str]], *, left: Sequence[str], right: Sequence[str] = ()
) -> Group:
    """Return a table of plain text below its title; the columns of text come first, then those of numbers."""
    table = Table()
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    return Group(Text(_printable(title)), table)


def _printable(text: str) -> str:
    """Return text without what would move the cursor, or worse: keys may come from a stranger's file."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
