"""What the system counts for this process: memory and open files.

They are read from /proc/self. Where there is none (not Linux), a value is None.
Source: proc_pid_status(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc/self")


def open_descriptors() -> int | None:
    """Return how many descriptors this process has open."""
    try:
        return len(os.listdir(_PROC / "fd"))
    except OSError:
        return None


def resident_bytes(process: int | str = "self") -> int | None:
    """Return the resident memory of a process, by default of this one."""
    return _status("VmRSS", process)


def peak_above(work: Callable[[], object]) -> int:
    """Do some work; return how far resident memory rose above what it was before, at its highest.

    What freed memory the allocator had kept is given back first, so that using it again counts. Where the
    system cannot forget an earlier peak, that of the whole process is taken: an upper bound.
    """
    _trim()
    with suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
    before = resident_bytes() or 0
    work()
    highest = _status("VmHWM")
    if highest is None:
        unit = 1 if sys.platform == "darwin" else 1024
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(0, highest - before)


def _status(name: str, process: int | str = "self") -> int | None:
    try:
        lines = (_PROC.parent / str(process) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _trim() -> None:
    with suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
