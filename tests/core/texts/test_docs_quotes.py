"""Errors that docs/faq.md, operating.md and limits.md quote in sentences are those that the code raises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megackpt
from megackpt.codec.tree import MAX_DEPTH
from megackpt.engine.background.saver import _MAX_QUEUED
from megackpt.engine.checkpoint.steps import _MAX_STEP
from megackpt.formats.zarr.chunks import MAX_CHUNKS
from megackpt.metadata.chunk_table import MAX_NUMEL
from tests.support.docs import FENCE, ROOT

PAGES = ["faq", "operating", "limits"]
OF_OTHERS = {
    "No space left on device (ENOSPC)",  # of the operating system
    "not enough values to unpack",  # of Python
}
_CODE = re.compile(r"`([^`\n]+)`")
_VARIABLE = re.compile(r"\.\.\.|\[[^\]]*\]|'[^']*'|\b\d[\d,]*\b|\bsaved\b|\ba rank\b|rank\(s\)")
"""Parts of a quotation that the code fills in; it says "requested" for "saved" of a load."""


def source_of_package() -> str:
    """Return the source of megackpt, with strings that go on in the next line joined."""
    texts = (path.read_text() for path in Path(megackpt.__file__).parent.rglob("*.py"))
    return "\n".join(re.sub(r'"\n\s+f?"', "", text) for text in texts)


def quotations(page: str) -> list[str]:
    """Return the texts in backticks that are sentences, or parts of one, and neither code nor commands."""
    text = FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text())
    codes = [code for code in _CODE.findall(text) if len(code.split()) >= 3]
    return [code for code in codes if not re.match(r"(megackpt|python|pip|pytest) |.*[=(]", code)]


def indented_errors() -> list[str]:
    """Return the errors that docs/errors.md shows without a block that raises them."""
    text = FENCE.sub("", (ROOT / "docs" / "errors.md").read_text())
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [" ".join(block.split()) for block in blocks]


@pytest.fixture(scope="module")
def sources() -> str:
    return source_of_package()


@pytest.mark.parametrize("page", PAGES)
def test_quoted_errors_are_those_of_the_code(page: str, sources: str) -> None:
    for quotation in quotations(page):
        parts = [part.strip() for part in _VARIABLE.split(quotation)]
        missing = [part for part in parts if len(part) > 3 and part not in sources]
        assert not missing or quotation in OF_OTHERS, f"no error of megackpt has {missing}"


def test_errors_that_are_shown_without_code_are_those_of_the_code(sources: str) -> None:
    errors = indented_errors()
    assert len(errors) >= 4
    for error in errors:
        parts = re.split(r"[.:;(),] ?|\b(?:and|by|while)\b", _VARIABLE.sub(".", error))
        missing = [part for part in parts if len(part.split()) > 4 and part.strip() not in sources]
        assert missing == [], error


def test_the_pages_quote_errors() -> None:
    assert sum(len(quotations(page)) for page in PAGES) >= 8


def test_the_largest_numbers_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| ([\d^,]+) \|$", text, re.MULTILINE))
    numbers = [eval(number.replace("^", "**").replace(",", "")) for number in rows.values()]
    assert numbers == [MAX_NUMEL, MAX_DEPTH, _MAX_STEP, _MAX_QUEUED, MAX_CHUNKS]
