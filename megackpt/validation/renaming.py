"""Stored keys by other names.

Owns patterns like `{"old.*": "new.*"}` and the proof that they keep keys apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megackpt.errors import DeclarationError, MismatchError


def rename_keys(keys: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each key; a key that no pattern fits keeps its own.

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
        if first.setdefault(new, key) != key:
            raise MismatchError(
                f"rename gives the stored keys {first[new]!r} and {key!r} the same name {new!r}. Make the "
                f"patterns "
                f"narrower.",
                key=new,
            )
    return renamed


def _compiled(pattern: str, new: str) -> re.Pattern[str]:
    if pattern.count("*") != new.count("*"):
        raise DeclarationError(
            f"rename {{{pattern!r}: {new!r}}}: {pattern.count('*')} and {new.count('*')} stars. What a "
            f"star stands for "
            f"is put in place of the star at the same position, so give as many on both sides."
        )
    return re.compile("(.*)".join(re.escape(piece) for piece in pattern.split("*")), re.DOTALL)


def _renamed(key: str, compiled: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in compiled:
        match = pattern.fullmatch(key)
        if match:
            fills = iter(match.groups())
            return "".join(next(fills) if piece == "*" else piece for piece in re.split(r"(\*)", new))
    return key
