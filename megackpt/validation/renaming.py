"""Renaming of stored keys by patterns like `{"old.*": "new.*"}`, so that no two keys get one name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megackpt.errors import DeclarationError, MismatchError


def rename_keys(keys: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each key, by the first pattern that matches it; other keys keep their names.

    >>> rename_keys(["a.x.w", "b"], {"a.*.w": "z.*"})
    {'a.x.w': 'z.x', 'b': 'b'}

    Raises:
        DeclarationError: a pattern and its replacement have different numbers of `*`.
        MismatchError: two keys would get one name.
    """
    compiled = [(_compiled(pattern, new), new) for pattern, new in patterns.items()]
    renamed = {key: _renamed(key, compiled) for key in keys}
    first: dict[str, str] = {}
    for key, new in renamed.items():
        # Keys that keep their names count as well: a renamed key must not replace one of them.
        if first.setdefault(new, key) != key:
            raise MismatchError(
                f"rename gives the stored keys {first[new]!r} and {key!r} the same name {new!r}. Make the "
                f"patterns narrower.",
                key=new,
            )
    return renamed


def _compiled(pattern: str, new: str) -> re.Pattern[str]:
    if pattern.count("*") != new.count("*"):
        raise DeclarationError(
            f"rename {{{pattern!r}: {new!r}}}: {pattern.count('*')} and {new.count('*')} stars. The text "
            f"that a star matches replaces the star at the same position, so give as many on both sides."
        )
    return re.compile("(.*)".join(re.escape(text) for text in pattern.split("*")), re.DOTALL)


def _renamed(key: str, compiled: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in compiled:
        match = pattern.fullmatch(key)
        if match:
            # The stars of the replacement take the texts of the pattern's in their order.
            matched = iter(match.groups())
            return "".join(next(matched) if text == "*" else text for text in re.split(r"(\*)", new))
    return key
