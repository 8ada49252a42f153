"""A save of ours that a user's strategy makes inside of its own.

A strategy may pass its arguments on to one of ours, as a wrapper does. Then ours saves the whole
checkpoint, and needs the common state, which the user's strategy never gets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from megackpt.mapping import StateDict
from megackpt.storage import is_url


@dataclass
class EnclosingSave:
    """The save for which a user's strategy was called.

    Attributes:
        directory: where to.
        common: common state, content metadata in it.
        is_taken: whether a strategy of ours saves, or will save, the whole checkpoint.
    """

    directory: str
    common: StateDict
    is_taken: bool = False


_CURRENT: ContextVar[EnclosingSave | None] = ContextVar("enclosing save", default=None)


@contextmanager
def enclosing_save(save: EnclosingSave) -> Iterator[None]:
    """Let saves of ours in this block, to the same directory, take the common state of a save."""
    token = _CURRENT.set(save)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def take_common(checkpoint_dir: str | os.PathLike[str]) -> StateDict | None:
    """Return common state for a save to this directory inside of another save; None if there is no other.

    Local. The other save then leaves the commit to this one.
    """
    current = _CURRENT.get()
    if current is None or _absolute(checkpoint_dir) != _absolute(current.directory):
        return None
    current.is_taken = True
    return current.common


def _absolute(directory: str | os.PathLike[str]) -> str:
    text = os.fspath(directory)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)
