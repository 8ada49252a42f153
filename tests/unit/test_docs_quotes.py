"""Errors that docs/faq.md, operating.md and limits.md quote in sentences are those that the code raises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megackpt
from megackpt.codec.tree import MAX_DEPTH
from megackpt.engine.background.saver import _MAX_QUEUED
from megackpt.engine.checkpoint.steps import _MAX_STEP
from megackpt.formats.zarr.chunks import MAX_CHUNKS
from megackpt.metadata.chunk_table import MAX_NUMEL
from tests.doc_blocks import FENCE, ROOT

PAGES = ["faq", "operating", "limits"]
OF_OTHERS = {
    "No space left on device (ENOSPC)",  # of the operating system
    "not enough values to unpack",  # of Python
}
_CODE = re.compile(r"`([^`\n]+)`")
_VARIABLE = re.compile(r"\.\.\.|\[[^\]]*\]|'[^']*'|\b\d[\d,]*\b|\bsaved\b")
"""Parts of a quotation that the code fills in; it says "requested" for "saved" of a load."""


def strings_of_package() -> str:
    """Return all string constants of megackpt, one after the other."""
    files = Path(megackpt.__file__).parent.rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(texts)


def quotations(page: str) -> list[str]:
    """Return the texts in backticks that are sentences, or parts of one, and neither code nor commands."""
    text = FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text())
    codes = [code for code in _CODE.findall(text) if len(code.split()) >= 3]
    return [code for code in codes if not re.match(r"(megackpt|python|pip|pytest) |.*[=(]", code)]


@pytest.fixture(scope="module")
def sources() -> str:
    return strings_of_package()


@pytest.mark.parametrize("page", PAGES)
def test_quoted_errors_are_those_of_the_code(page: str, sources: str) -> None:
    for quotation in quotations(page):
        parts = [part.strip() for part in _VARIABLE.split(quotation)]
        missing = [part for part in parts if len(part) > 3 and part not in sources]
        assert not missing or quotation in OF_OTHERS, f"no error of megackpt has {missing}"


def test_the_pages_quote_errors() -> None:
    assert sum(len(quotations(page)) for page in PAGES) >= 8


def test_the_largest_numbers_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| ([\d^,]+) \|$", text, re.MULTILINE))
    numbers = [eval(number.replace("^", "**").replace(",", "")) for number in rows.values()]
    assert numbers == [MAX_NUMEL, MAX_DEPTH, _MAX_STEP, _MAX_QUEUED, MAX_CHUNKS]
