"""Signals that ask for a save.

Owns the handlers, from construction to `close`. A handler only sets a flag: what a save needs (locks, memory,
other ranks) must not be touched in the middle of anything. Acting on flags is up to `schedule`.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Callable

from megackpt.errors import DeclarationError

_GO_ON = (signal.SIGUSR1, signal.SIGUSR2)


def asks_to_exit(signum: int) -> bool:
    """Say whether a signal asks for an end after the save: all do but SIGUSR1 and SIGUSR2."""
    return signum not in _GO_ON


class SignalWatch:
    """Notes which of some signals this process has received.

    Handlers of before are called as well, but for Python's own of SIGINT, which would end the process.

    Raises:
        DeclarationError: a signal cannot be handled, or this is not the main thread.

    Attributes:
        signals: their numbers, as `SaveSchedule.signals`.
    """

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = signals
        self._flags = dict.fromkeys(self.signals, False)
        self._before: dict[int, Callable[..., object] | int | None] = {}
        self._is_closed = False
        for signum in self.signals:
            try:
                self._before[signum] = signal.signal(signum, self._note)
            except (ValueError, OSError) as error:
                self.close()
                raise DeclarationError(
                    f"SaveSchedule.signals: signal {signum} cannot be handled ({error}). Name signals as "
                    f"signal.SIGTERM, and construct the Checkpointer in the main thread."
                ) from error

    def received(self) -> tuple[int, ...]:
        """Return for each signal 1 if it was received and is not served yet, else 0."""
        return tuple(int(self._flags[signum]) for signum in self.signals)

    def serve(self, signum: int) -> None:
        """Forget that a signal was received."""
        self._flags[signum] = False

    def close(self) -> None:
        """Put the handlers of before back, where nobody has put others in place of these since.

        Such others may still call, or put back, these: then they do what the handlers of before do.
        """
        self._is_closed = True
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, signal.SIG_DFL if before is None else before)

    def _note(self, signum: int, frame: types.FrameType | None) -> None:
        self._flags[signum] = True
        before = self._before.get(signum)
        if callable(before) and (self._is_closed or before is not signal.default_int_handler):
            before(signum, frame)
        elif self._is_closed and before != signal.SIG_IGN and signal.getsignal(signum) == self._note:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
