"""Stop a process so that it has stopped when the call returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_MOST_S = 30.0


def stop_process(pid: int) -> None:
    """Send SIGSTOP to process `pid`, and wait until each of its threads has stopped.

    The kernel lets a thread run on until the thread that takes the signal is scheduled. On a busy machine
    another thread of the process can answer several requests before.

    Raises:
        TimeoutError: A thread still runs after 30 s.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _MOST_S
    while not _has_stopped(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs {_MOST_S:g} s after SIGSTOP")
        time.sleep(0.001)


def _has_stopped(pid: int) -> bool:
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        # The state follows the name, which is in parentheses and may hold any character.
        states.append(text.rpartition(")")[2].split()[0])
    return all(state in ("T", "Z") for state in states)
