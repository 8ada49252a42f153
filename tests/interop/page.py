"""docs/interop.md: the tables of matrix.py as a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from environments import ROOT
from plan import READERS

if TYPE_CHECKING:
    from matrix import Table

PAGE = ROOT / "docs" / "interop.md"
HEAD = Path(__file__).with_name("page_head.md")


def write_page(tables: Iterable[Table]) -> None:
    """Write the page."""
    PAGE.write_text("\n".join([HEAD.read_text(), *(markdown(table) for table in tables)]))


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    name, version = table.backend
    readers = READERS[table.backend]
    lines = [
        f"## {name}, version {version}",
        "",
        f"| what | written by | {' | '.join(f'read by {r}' for r in readers)} |",
    ]
    lines.append("|---" * (len(readers) + 2) + "|")
    for (what, form, writer), cells in table.rows.items():
        texts = [cells[reader].text().replace("|", "\\|") for reader in readers]
        lines.append(f"| {what}{f', `{form}`' if form else ''} | {writer} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])
