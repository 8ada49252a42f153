"""Signals that end a run in good order: it finishes its step, saves, and exits.

Owns listening, and agreeing with the other ranks, each of which may get the signal at another moment.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

EXIT_CODE = 75
"""Of a run that was ended by a signal and has saved: "try again later", EX_TEMPFAIL of sysexits.h."""


class SignalWatch:
    """Listens for one signal, by name; None listens for nothing."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._came = False
        if name is not None:
            signal.signal(signal.Signals[name], self._note)

    def came(self) -> bool:
        """Whether any rank got the signal. Collective over all ranks, if there is a signal to listen for."""
        if self._name is None:
            return False
        flag = torch.tensor([int(self._came)])
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
