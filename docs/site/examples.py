"""Shows the examples of docstrings as code on the site; in the source they are plain doctests."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts each paragraph that begins with `>>>` into a fence, before the docstring is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of whatever has one."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    margin = example[1]
    return f"{margin}```pycon\n{example[0]}\n{margin}```"
