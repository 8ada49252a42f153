"""Lines on stderr that show how far a benchmark is. On a terminal, each replaces the one before."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TextIO

_CLEAR = "\r\x1b[K"  # to the beginning of the line, and erase it


class BenchProgress:
    """What is measured now, the time spent, and an estimate of the time left.

    The estimate takes every case as equally long.
    """

    def __init__(self, stream: TextIO | None, cases: int) -> None:
        """Take where to write, or None to write nothing, and the number of cases."""
        self._stream, self._cases = stream, cases
        self._is_terminal = stream is not None and stream.isatty()
        self._case, self._number = "", 0
        self._began = time.perf_counter()

    def begin(self, case: str) -> None:
        """Show that the next case begins."""
        self._case, self._number = case, self._number + 1
        self.show("begins", 0.0)

    def show(self, doing: str, share: float) -> None:
        """Show what is done now; share is how much of the case is done, from 0 to 1."""
        if self._stream is None:
            return
        spent = time.perf_counter() - self._began
        done = (max(self._number - 1, 0) + share) / self._cases
        left = f", about {_clock(spent / done - spent)} left" if done else ""
        where = f"{self._case} ({self._number} of {self._cases}): " if self._case else ""
        line = f"bench: {where}{doing}, {_clock(spent)} spent{left}"
        self._stream.write(f"{_CLEAR}{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Erase the line of a terminal."""
        if self._stream is not None and self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
