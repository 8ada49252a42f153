"""What shows that a writer process is not stuck: what it says while it works or waits, and what it moves.

Owns both ends of that: the pulse in the process, and the watch of the rank that has started it. For how long
a process may show nothing, and what becomes of one that does so longer, is up to `process`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from megackpt.engine.background.messages import AliveMessage, FromWriter

BEAT_S = 1.0
"""How often a process says so, and how often its rank looks."""


class Heartbeat:
    """Tells the rank that this process works, or waits for others, at most once in BEAT_S. For any thread."""

    def __init__(self, tell: Callable[[FromWriter], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def beat(self) -> None:
        """Say so: something was moved, or what is waited for has a deadline of its own."""
        now = time.monotonic()
        with self._lock:
            if now - self._last < BEAT_S:
                return
            self._last = now
        self._tell(AliveMessage())


class ProgressWatch:
    """How long a process has shown no sign of progress. For one thread, which looks once in BEAT_S.

    Looks are counted, no clock is asked: where this process was stopped itself, by a scheduler or a debugger,
    nothing of the other was seen, and nothing follows from that.

    Attributes:
        silent_s: for how long, in seconds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._moved = 0
        self.silent_s = 0.0

    def heard(self) -> None:
        """Note a message, or that there is nothing to do."""
        self.silent_s = 0.0

    def look(self) -> None:
        """Note that BEAT_S have passed without a message."""
        moved = _bytes_moved(self._pid)
        self.silent_s = self.silent_s + BEAT_S if moved == self._moved else 0.0
        self._moved = moved


def _bytes_moved(pid: int) -> int:
    """Return how many bytes system calls of a process have read and written; 0 where nobody counts.

    A file that is written in one piece is many such calls, where pieces say nothing. Sockets are not counted.
    Source: proc_pid_io(5).
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
