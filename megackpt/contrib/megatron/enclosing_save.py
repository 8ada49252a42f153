"""A save of megackpt inside the save of a user's strategy.

A strategy may pass its arguments on to one of megackpt's, as a wrapper does. The inner strategy then saves
the whole checkpoint, and needs the common state, which the user's strategy never gets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from megackpt.entities import StateDict
from megackpt.storage import is_url


@dataclass
class EnclosingSave:
    """The save that called a user's strategy.

    Attributes:
        directory: the directory of the checkpoint.
        common: common state, including content metadata.
        is_taken: whether a strategy of ours saves, or will save, the whole checkpoint.
    """

    directory: str
    common: StateDict
    is_taken: bool = False


_CURRENT: ContextVar[EnclosingSave | None] = ContextVar("enclosing save", default=None)


@contextmanager
def enclosing_save(save: EnclosingSave) -> Iterator[None]:
    """Give saves of megackpt in this block, to the same directory, the common state of a save."""
    token = _CURRENT.set(save)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def take_common(checkpoint_dir: str | os.PathLike[str]) -> StateDict | None:
    """Return the common state of the enclosing save to this directory; None if there is no such save.

    Local. The enclosing save then leaves the commit to the inner one.
    """
    current = _CURRENT.get()
    if current is None or _absolute(checkpoint_dir) != _absolute(current.directory):
        return None
    current.is_taken = True
    return current.common


def _absolute(directory: str | os.PathLike[str]) -> str:
    text = os.fspath(directory)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)
