"""A process that this one has started: its connection, its end, and how that reads in an error."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from multiprocessing.connection import Connection

END_S = 5.0
"""How long a process, or a thread that serves it, may take to end."""


class ChildProcess:
    """A child process and the connection to it. Any thread may use it.

    Attributes:
        connection: exchanges messages with it.
        why_killed: the reason, as a verb that follows "The process"; empty if `kill` was given none.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process = process
        self.connection = connection
        self.why_killed = ""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self, reason: str = "") -> None:
        """Kill it; do nothing if it has ended."""
        self.why_killed = self.why_killed or reason
        self._process.kill()

    def end(self) -> None:
        """Wait until it has ended by itself; kill it if it does not, or if there is a reason to."""
        if self.why_killed or not self.has_ended(END_S):
            self._process.kill()
            self.has_ended(END_S)

    def has_ended(self, most_s: float = 0.0) -> bool:
        """Return whether it ends within most_s seconds. One that is stuck in the kernel cannot be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(most_s)
        return self._process.returncode is not None

    def how_it_ended(self) -> str:
        """Return how it ended, as a verb that follows "The process"."""
        if self.why_killed:
            return f"{self.why_killed} and was killed"
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
