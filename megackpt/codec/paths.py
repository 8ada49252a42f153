"""The notation of paths inside a nested value in messages: `args.optimizer.hooks[3]`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

TOP = "(top level)"


def format_path(prefix: str, steps: Sequence[Hashable]) -> str:
    """Return the path of the value that the steps (keys, attribute names, list positions) lead to.

    Different values have different paths, as long as keys have different `repr`s.

    >>> format_path("", ["args", "layers.0", 3, "lr"])
    "args['layers.0'][3].lr"
    >>> format_path("", [])
    '(top level)'
    """
    path = prefix
    for step in steps:
        if isinstance(step, str) and step.isidentifier():
            path += f".{step}" if path else step
        else:
            path += f"[{step!r}]"
    return path or TOP
