"""The option that the text of an error ends in, as a user would paste it into a program."""

from __future__ import annotations

import ast
import re
from typing import Any

import megackpt

STARTS = ("LoadOptions(", "SaveOptions(")


_AFTER = re.compile(r"\.?( (Rank|Ranks) [^.]* failed too\.)?")
"""The rest of a text after its option: at most which other ranks have failed."""


def pasted(text: str) -> Any:
    """Return the options that a text ends in; nothing but names of megackpt may be needed for them."""
    at = max(text.rfind(start) for start in STARTS)
    assert at >= 0, f"no option in {text!r}"
    for end in range(at, len(text) + 1):
        source = text[at:end]
        if source.endswith(")"):
            try:
                ast.parse(source, mode="eval")
            except SyntaxError:
                continue
            assert _AFTER.fullmatch(text[end:]), f"the option is not the end: {text!r}"
            return eval(source, vars(megackpt).copy())
    raise AssertionError(f"not to be pasted: {text[at:]!r}")
