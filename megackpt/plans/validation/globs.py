"""Globs that an error proposes for an option: they match given keys, and as few others as possible."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_MOST = 4  # keys that are listed one by one


def globs_for(keys: Collection[str]) -> list[str]:
    """Return globs that together match all of these keys. Pure.

    A few keys stand for themselves. Of many, those with an equal last name share a glob.

    >>> globs_for(["a.weight", "a[0]"])
    ['a.weight', 'a[[]0]']
    >>> globs_for([f"state.{name}.embedding.weight" for name in ("a", "b", "c", "d", "e")])
    ['state.*.embedding.weight']
    """
    if len(keys) <= _MOST:
        return sorted(map(escaped, keys))
    by_name: dict[str, list[str]] = {}
    for key in sorted(keys):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    globs = [_shared(of_name) for of_name in by_name.values()]
    if len(globs) <= 2 * _MOST:
        return sorted(globs)
    return [_shared(sorted(keys))]


def rules_text(globs: Iterable[str], policy: str) -> str:
    """Return the option with a rule for each glob, to be pasted; policy is the field and its value.

    >>> rules_text(["b"], "missing=Policy.IGNORE")
    "LoadOptions(rules=(KeyRule(keys='b', missing=Policy.IGNORE),))"
    """
    rules = ", ".join(f"KeyRule(keys={glob!r}, {policy})" for glob in globs)
    return f"LoadOptions(rules=({rules},))"


def globs_with_states(keys: Collection[str]) -> list[str]:
    """Return globs that match keys and those of their optimizer state, which other ranks may have. Pure.

    >>> globs_with_states(["embedding.weight", "optimizer.state.exp_avg.embedding.weight"])
    ['*embedding.weight']
    """
    params = [key for key in keys if not any(key.endswith(f".{other}") for other in keys)]
    return [f"*{escaped(key)}" for key in sorted(params)]


def escaped(key: str) -> str:
    """Return a glob that matches a key and nothing else."""
    return re.sub(r"([*?[])", r"[\1]", key)


def _shared(keys: list[str]) -> str:
    """Return the narrowest glob of one star that matches keys."""
    if len(keys) == 1:
        return escaped(keys[0])
    first = _common_start(keys)
    last = _common_start([key[len(first) :][::-1] for key in keys])[::-1]
    return f"{escaped(first)}*{escaped(last)}"


def _common_start(texts: list[str]) -> str:
    lowest, highest = min(texts), max(texts)  # all others begin with what these two begin with
    same = [a == b for a, b in zip(lowest, highest, strict=False)]
    return lowest[: same.index(False)] if False in same else lowest[: len(same)]
