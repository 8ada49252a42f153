"""The fenced blocks of README.md and docs/, and how a python block is run."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

from megackpt.errors import CheckpointError

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ON_RANKS = ROOT / "docs" / "coming-from.md"
"""The page whose blocks run on several ranks: tests/contrib/torch/test_coming_from.py."""
FENCE = re.compile(
    r"^(?P<margin> *)```(?P<kind>\w*)\n(?P<code>.*?)^(?P=margin)```$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        kind: the word after the fence, or "".
        code: its lines.
        line: how many lines of the page come before them.
        section: the heading that it stands under, "" before the first of level 2.
        lead: the text between the heading or block before and this one.
    """

    kind: str
    code: str
    line: int
    section: str
    lead: str

    @property
    def first_line(self) -> str:
        """The first line of the code."""
        return self.code.partition("\n")[0]


class Example(NamedTuple):
    """A python block, the number of its first line, and the output it is shown with, if any."""

    code: str
    line: int
    output: str | None


def blocks_of(text: str) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    blocks, end = [], 0
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        sections = re.findall(r"^## (.*)$", FENCE.sub("", before), re.MULTILINE)
        lead = re.split(r"^#+ .*$", text[end : fence.start()], flags=re.MULTILINE)[-1].strip()
        line = text.count("\n", 0, fence.start("code"))
        blocks.append(Block(fence["kind"], fence["code"], line, sections[-1] if sections else "", lead))
        end = fence.end()
    return blocks


def examples_of(text: str) -> list[Example]:
    """Return the python blocks; a `text` block right behind one is its output."""
    blocks = blocks_of(text)
    examples = []
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.kind == "python":
            has_output = following is not None and following.kind == "text" and not following.lead
            examples.append(
                Example(block.code, block.line, following.code if following and has_output else None)
            )
    return examples


def run(example: Example, path: Path, namespace: dict[str, Any]) -> str:
    """Execute a block; return what it prints, or the text of the error that it is shown with."""
    code = compile("\n" * example.line + example.code, str(path), "exec")  # lines count as in the document
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, namespace)
        except CheckpointError as error:
            if example.output is None:
                raise
            return f"{error}\n"
    return printed.getvalue()
