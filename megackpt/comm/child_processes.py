"""Starting processes with multiprocessing: their environment, and no modules of the current directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_lock = threading.Lock()  # threads share one environment
_before: dict[str, str | None] = {}  # values from before a thread entered
_threads: dict[str, int] = {}  # how many threads are inside


def without_current_directory() -> AbstractContextManager[None]:
    """Start interpreters, inside of the block, that do not look for modules in the current directory.

    They get the search path of this process before anything else is imported, as multiprocessing does. Needs
    Python 3.11; 3.10 has no such option.
    """
    return child_environment("PYTHONSAFEPATH", "1")


@contextmanager
def child_environment(name: str, value: str) -> Iterator[None]:
    """Start processes, inside of the block, with a variable set in their environment.

    Several threads may be inside at once, with one value; the last one to leave restores the old value.
    """
    with _lock:
        if not _threads.get(name):
            _before[name] = os.environ.get(name)
            os.environ[name] = value
        _threads[name] = _threads.get(name, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _threads[name] -= 1
            if not _threads[name]:
                os.environ.pop(name, None)
                old = _before.pop(name)
                if old is not None:
                    os.environ[name] = old
