"""A small cache of files that are open for reading.

Owns how long a descriptor stays open: until the least recently used of too many, or until its file changes;
never while a thread reads from it. How a file is opened safely is up to the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Open:
    descriptor: int
    readers: int = 0
    dropped: bool = False  # to be closed by its last reader


class DescriptorCache:
    """Keeps at most `limit` unused descriptors open, by name. Safe for many threads.

    open_file opens a name for reading and returns the descriptor, which then belongs to the cache.
    """

    def __init__(self, open_file: Callable[[str], int], *, limit: int) -> None:
        self._open_file = open_file
        self._limit = limit
        self._open: OrderedDict[str, _Open] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[int]:
        """Yield a descriptor that stays open at least until the end of the block."""
        entry = self._take(name)
        try:
            yield entry.descriptor
        finally:
            self._give_back(entry)

    def drop(self, name: str) -> None:
        """Forget a file that was replaced or deleted: the next reader opens it anew."""
        with self._lock:
            entry = self._open.pop(name, None)
            if entry is not None:
                _retire(entry)

    def clear(self) -> None:
        """Forget all files."""
        with self._lock:
            while self._open:
                _retire(self._open.popitem()[1])

    def _take(self, name: str) -> _Open:
        with self._lock:
            entry = self._open.get(name)
            if entry is None:
                entry = self._open[name] = _Open(self._open_file(name))
            else:
                self._open.move_to_end(name)
            entry.readers += 1
            while len(self._open) > self._limit:
                _retire(self._open.popitem(last=False)[1])
            return entry

    def _give_back(self, entry: _Open) -> None:
        with self._lock:
            entry.readers -= 1
            if entry.dropped:
                _retire(entry)


def _retire(entry: _Open) -> None:
    """Close the descriptor now, or leave that to the last of its readers."""
    entry.dropped = True
    if not entry.readers:
        os.close(entry.descriptor)
