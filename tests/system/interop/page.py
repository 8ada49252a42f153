"""docs/interop.md: the tables of matrix.py as a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.system.interop.environments import ROOT
from tests.system.interop.plan import READERS, Backend

if TYPE_CHECKING:
    from tests.system.interop.matrix import Table

PAGE = ROOT / "docs" / "interop.md"
HEAD = Path(__file__).with_name("page_head.md")


def write_page(tables: Iterable[Table]) -> None:
    """Write the page; tables that are not given stay as they are."""
    sections = (
        {section.splitlines()[0]: section for section in PAGE.read_text().split("## ")[1:]}
        if PAGE.exists()
        else {}
    )
    sections |= {section.splitlines()[0]: section for section in map(markdown, tables)}
    body = "\n".join(
        f"## {sections[title].rstrip()}\n" for title in map(title_of, READERS) if title in sections
    )
    PAGE.write_text(f"{HEAD.read_text()}\n{body}")


def title_of(backend: Backend) -> str:
    """Return the title of a format's section."""
    return f"{backend[0]}, version {backend[1]}"


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    readers = READERS[table.backend]
    lines = [
        title_of(table.backend),
        "",
        f"| what | written by | {' | '.join(f'read by {r}' for r in readers)} |",
    ]
    lines.append("|---" * (len(readers) + 2) + "|")
    for (what, form, writer), cells in table.rows.items():
        texts = [cells[reader].text().replace("|", "\\|") for reader in readers]
        lines.append(f"| {what}{f', `{form}`' if form else ''} | {writer} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])
