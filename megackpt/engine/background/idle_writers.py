"""Writer processes that are kept for the next saver of this process.

Starting one takes seconds of a processor, most of them to import torch. So a process that is no longer used
is kept, without staging memory, for the next saver with the same options. It ends with this process.
"""

from __future__ import annotations

import atexit
import threading

from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.options import AsyncOptions

_Kind = tuple[int, str | None, str | None]

_MAX_IDLE = 1


def take_writer(options: AsyncOptions, *, hook: str | None) -> WriterProcess:
    """Return a process that nobody else uses, with staging memory of size 0."""
    kind = _kind(options, hook)
    with _LOCK:
        for writer in list(_IDLE):
            if writer.is_lost:
                _IDLE.remove(writer)
                writer.close()
            elif writer.kind == kind:
                _IDLE.remove(writer)
                return writer
    return WriterProcess(options, memory=StagingMemory(), kind=kind)


def return_writer(writer: WriterProcess) -> None:
    """Keep a process that has nothing to do; end those that are too many."""
    writer.rest()
    with _LOCK:
        if not _IDLE:
            atexit.register(_end_all)
        _IDLE.append(writer)
        surplus = _IDLE[:-_MAX_IDLE]
        del _IDLE[:-_MAX_IDLE]
    for old in surplus:
        old.close()


def _kind(options: AsyncOptions, hook: str | None) -> _Kind:
    return options.nice, options.ionice, hook


def _end_all() -> None:
    atexit.unregister(_end_all)
    with _LOCK:
        idle, _IDLE[:] = list(_IDLE), []
    for writer in idle:
        writer.close()


_IDLE: list[WriterProcess] = []
_LOCK = threading.Lock()
