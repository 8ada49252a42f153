"""Writer processes that wait for another use in this process.

Owns which there are. To start one takes seconds of a processor, most of them to import torch, so one that is
given back is kept, without memory for staging, for the next saver with the same options. It ends with this
process, as all do.
"""

from __future__ import annotations

import atexit
import threading

from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.options import AsyncOptions

_Kind = tuple[int, str | None, str | None]

_MOST_IDLE = 1


def take_writer(options: AsyncOptions, *, hook: str | None) -> WriterProcess:
    """Return a process that nobody else uses, with an arena without memory."""
    with _LOCK:
        for writer in list(_IDLE):
            if writer.is_lost:
                _IDLE.remove(writer)
                writer.close()
            elif writer.kind == _kind(options, hook):
                _IDLE.remove(writer)
                return writer
    return WriterProcess(options, arena=StagingMemory(), kind=_kind(options, hook))


def give_writer(writer: WriterProcess) -> None:
    """Take a process back that has nothing to do."""
    writer.rest()
    with _LOCK:
        if not _IDLE:
            atexit.register(_end_all)
        _IDLE.append(writer)
        surplus = _IDLE[:-_MOST_IDLE]
        del _IDLE[:-_MOST_IDLE]
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
