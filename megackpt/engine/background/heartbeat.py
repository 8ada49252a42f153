"""How a rank detects that its writer process is stuck: no messages, and no bytes read or written.

`Heartbeat` runs in the writer process, `ProgressWatch` in the rank that has started it. `process` decides
how long a process may make no progress, and what happens then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from megackpt.engine.background.messages import AliveMessage, FromWriter

BEAT_S = 1.0
"""How often a process sends a message, and how often its rank checks."""


class Heartbeat:
    """Tells the rank that this process works or waits for others, at most once in BEAT_S.

    Any thread may use it.
    """

    def __init__(self, send: Callable[[FromWriter], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note progress: bytes were moved, or this process waits for something that has its own deadline."""
        now = time.monotonic()
        with self._lock:
            if now - self._last < BEAT_S:
                return
            self._last = now
        self._send(AliveMessage())  # without the lock: a full pipe blocks


class ProgressWatch:
    """Measures for how long a process has made no progress. For one thread, which checks once in BEAT_S.

    It counts checks and reads no clock. If this process is stopped itself, by a scheduler or a debugger,
    the clock goes on, and the other process would look stuck.

    Attributes:
        silent_s: for how long, in seconds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes_moved = 0
        self.silent_s = 0.0

    def reset(self) -> None:
        """Note a message, or that there is nothing to do."""
        self.silent_s = 0.0

    def check(self) -> None:
        """Note that BEAT_S have passed without a message."""
        bytes_moved = _bytes_moved(self._pid)
        self.silent_s = self.silent_s + BEAT_S if bytes_moved == self._bytes_moved else 0.0
        self._bytes_moved = bytes_moved


def _bytes_moved(pid: int) -> int:
    """Return how many bytes system calls of a process have read and written; 0 if the system does not count.

    A large file is written by many such calls, during which the process sends no message. Sockets are not
    counted. Source: proc_pid_io(5).
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
