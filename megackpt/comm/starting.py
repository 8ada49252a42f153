"""How multiprocessing starts processes of ours: without modules of the current directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def without_current_directory() -> Iterator[None]:
    """Start interpreters, inside of the block, that do not look for modules in the current directory.

    They get the search path of this process before anything else is imported, as multiprocessing does. Needs
    Python 3.11; 3.10 has no such option.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[_SAFE_PATH]
        if before is not None:
            os.environ[_SAFE_PATH] = before
