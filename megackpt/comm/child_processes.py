"""Starting processes with multiprocessing: their environment, and no modules of the current directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_lock = threading.Lock()  # threads share one environment
_before: dict[str, str | None] = {}  # the value of each variable before the first thread set it
_threads: dict[str, int] = {}  # how many threads are in a block that sets the variable


def without_current_directory() -> AbstractContextManager[None]:
    """Interpreters that start in the block do not look for modules in the current directory.

    multiprocessing gives them the search path of this process before they import anything else. Python 3.10
    has no such option and ignores it.
    """
    return child_environment("PYTHONSAFEPATH", "1")


@contextmanager
def child_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes that start in the block.

    Several threads may be in such a block at once, all with the same value. The last one to leave restores
    the old value.
    """
    with _lock:
        # Only the first thread saves the old value. A later one would save what the first has set.
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
