"""When a step is saved, and to which destinations: the same answer on all ranks.

Multiples of steps need no communication. Time and signals need it: about once a second, each rank sends 256
bytes to each other rank. Rank 0 chooses the step of the next exchange in the last exchange.
"""

from __future__ import annotations

import os
import signal
import time
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megackpt.comm import Group, compare_step
from megackpt.errors import DeclarationError
from megackpt.run.checkpointer.options import MAX_SIGNALS, SaveSchedule, Tiers

_MAX_STEPS_APART = 100  # if steps become slower, the next exchange is still this many steps away
# One for each signal of a schedule: messages have one length, also if ranks have other schedules.
_SIGNALS = tuple(f"signal {number}" for number in range(MAX_SIGNALS))
_SAVE_ONLY_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class SaveTrigger:
    """Decides whether a save is due. Has the step of the last save, and the signals that all ranks know of.

    Args:
        schedule: when to save.
        signals: the signals that this process has received.
        clock: returns seconds; only rank 0's is used.
    """

    def __init__(
        self, schedule: SaveSchedule, signals: SignalWatch, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._schedule = schedule
        self._signals = signals
        self._clock = clock
        self._since: int | None = None  # the step that was saved or loaded last
        self._since_s = clock()
        self._last_answer: tuple[int, bool] | None = None  # step and answer
        self._next_exchange = 0  # the step of the next exchange
        self._last_exchange: tuple[int, float] | None = None  # step and time
        self._steps_apart = 1
        self._exit_signal: int | None = None
        self._is_signalled = False

    @property
    def exit_signal(self) -> int | None:
        """The signal at which the run ends after a save, once all ranks know of it."""
        return self._exit_signal

    @property
    def is_signalled(self) -> bool:
        """Whether a save is due because of a signal, and none was tried since; the same on all ranks."""
        return self._is_signalled

    def should_save(self, step: int, group: Group) -> bool:
        """Return whether a step is due. Collective over the group, at some steps.

        Raises:
            DeclarationError: ranks ask about different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        if self._last_answer is not None and self._last_answer[0] == step:
            return self._last_answer[1]
        if self._since is None:
            self._since = max(step - 1, 0)
        is_due = passes_multiple(self._schedule.steps, step=step, since=self._since)
        needs_exchange = self._schedule.seconds is not None or bool(self._signals.signals)
        if needs_exchange and step >= self._next_exchange:
            is_due = self._exchange(step, group) or is_due
        is_due = is_due or self._is_signalled
        is_due = is_due and step != self._since  # that step is saved already
        self._last_answer = step, is_due
        return is_due

    def saved(self, step: int) -> None:
        """Note that a save of a step was tried. Even if it failed, the next one is due after the interval."""
        self._restart_interval(step)
        for signum in self._signals.signals:
            if not asks_to_exit(signum):  # the save of this step also covers signals that arrived during it
                self._signals.clear(signum)

    def loaded(self, step: int) -> None:
        """Note that training continues from a step."""
        self._restart_interval(step)
        self._next_exchange, self._last_exchange, self._steps_apart = 0, None, 1

    def _restart_interval(self, step: int) -> None:
        self._since, self._since_s, self._last_answer = step, self._clock(), None
        self._is_signalled = False

    def _exchange(self, step: int, group: Group) -> bool:
        """Exchange time and signals with all ranks; return whether a save is due. Collective."""
        settings = zlib.crc32(repr((self._schedule, self._signals.signals)).encode())
        with compare_step(
            group,
            "agreeing whether to save",
            equal=("step", "schedule"),
            largest=("is time", "steps apart", *_SIGNALS),
        ) as asking:
            is_time, steps_apart = self._time_and_distance(step) if group.rank == 0 else (0, 0)
            steps_apart = 1 if group.size == 1 else steps_apart  # without other ranks an exchange is free
            received = self._signals.received()
            asking.equal = {"step": step, "schedule": settings}
            asking.largest = {"is time": is_time, "steps apart": steps_apart, **dict.fromkeys(_SIGNALS, 0)}
            asking.largest |= dict(zip(_SIGNALS, received, strict=False))
        if not all(asking.is_equal.values()):
            what = "the same schedule" if asking.is_equal["step"] else "the same step"
            raise DeclarationError(
                f"Ranks call should_save or maybe_save differently: give {what} on all of them, and "
                f"call it on all ranks at every step (this is rank {group.rank}, step {step}).",
                rank=group.rank,
            )
        self._steps_apart = asking.maximum["steps apart"]
        self._next_exchange = step + self._steps_apart
        self._last_exchange = step, self._clock()
        is_asked = self._take_signals([asking.maximum[name] for name in _SIGNALS])
        return is_asked or bool(asking.maximum["is time"])

    def _take_signals(self, flags: Sequence[int]) -> bool:
        """Act on the signals that any rank has received; return whether there are some.

        flags has a number for each signal of the schedule, not 0 if it was received, and padding after them.
        """
        received = [signum for signum, is_set in zip(self._signals.signals, flags, strict=False) if is_set]
        for signum in received:
            self._signals.clear(signum)
            if asks_to_exit(signum) and self._exit_signal is None:
                self._exit_signal = signum
        self._is_signalled = self._is_signalled or bool(received)
        return bool(received)

    def _time_and_distance(self, step: int) -> tuple[int, int]:
        """Return 1 if a save is due by time, else 0; and the number of steps until the next exchange."""
        now, seconds = self._clock(), self._schedule.seconds
        is_time = int(seconds is not None and now - self._since_s >= seconds)
        if self._last_exchange is None:
            return is_time, 1
        last_step, last_s = self._last_exchange
        steps_apart = steps_until_exchange(
            steps_since=step - last_step,
            seconds_since=now - last_s,
            before=self._steps_apart,
            agree_s=self._schedule.agree_s,
        )
        return is_time, steps_apart


def passes_multiple(steps: int | None, *, step: int, since: int) -> bool:
    """Return whether a multiple of `steps` is greater than since and at most step.

    >>> passes_multiple(100, step=100, since=99), passes_multiple(100, step=199, since=100)
    (True, False)
    """
    return steps is not None and step // steps > since // steps


def steps_until_exchange(*, steps_since: int, seconds_since: float, before: int, agree_s: float) -> int:
    """Return the number of steps until the next exchange, which should come after about agree_s.

    The number at most doubles each time, so that a few fast steps do not delay the next exchange for long.

    Args:
        steps_since: steps since the last exchange.
        seconds_since: how long they took.
        before: the result of this function at the last exchange.
        agree_s: as in `SaveSchedule`.

    >>> steps_until_exchange(steps_since=8, seconds_since=0.2, before=8, agree_s=1.0)
    16
    >>> steps_until_exchange(steps_since=8, seconds_since=40.0, before=8, agree_s=1.0)
    1
    """
    most = min(2 * before, _MAX_STEPS_APART)
    fitting = most if seconds_since <= 0 else min(most, int(agree_s * max(steps_since, 1) / seconds_since))
    return max(1, fitting)


def asks_to_exit(signum: int) -> bool:
    """Return whether a run ends after the save of a signal: for all signals but SIGUSR1 and SIGUSR2."""
    return signum not in _SAVE_ONLY_SIGNALS


class SignalWatch:
    """Records which of some signals this process has received, from `start` to `close`.

    A handler only sets a flag: at an arbitrary point of the program, a save could not use locks, memory or
    other ranks. Handlers that were set before are called as well, except Python's own handler for SIGINT,
    which would end the process. A process that is forked later inherits the handlers (a worker of a data
    loader): there each does what the earlier one does, as after `close`.

    Attributes:
        signals: their numbers, as `SaveSchedule.signals`.
    """

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = signals
        self._flags = dict.fromkeys(self.signals, False)
        self._earlier_handlers: dict[int, Callable[..., object] | int | None] = {}
        self._is_closed = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Set the handlers.

        Raises:
            DeclarationError: a signal cannot be handled, or this is not the main thread. No handler is set.
        """
        for signum in self.signals:
            try:
                self._earlier_handlers[signum] = signal.signal(signum, self._note)
            except (ValueError, OSError) as error:
                self.close()
                raise DeclarationError(
                    f"SaveSchedule.signals: signal {signum} cannot be handled ({error}). Name signals as "
                    f"signal.SIGTERM, and construct the Checkpointer in the main thread."
                ) from error

    def received(self) -> tuple[int, ...]:
        """Return 1 for each signal that was received and not cleared since, else 0."""
        return tuple(int(self._flags[signum]) for signum in self.signals)

    def clear(self, signum: int) -> None:
        """Forget that a signal was received."""
        self._flags[signum] = False

    def close(self) -> None:
        """Restore the earlier handlers, unless a later handler has replaced this one.

        A later handler may still call this one, or restore it. Then this one does what the earlier one does.
        """
        self._is_closed = True
        for signum, handler in self._earlier_handlers.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _note(self, signum: int, frame: types.FrameType | None) -> None:
        """Set the flag of a signal and call the earlier handler."""
        self._flags[signum] = True
        earlier = self._earlier_handlers.get(signum)
        is_over = self._is_closed or os.getpid() != self._pid
        if callable(earlier) and (is_over or earlier is not signal.default_int_handler):
            earlier(signum, frame)
        elif is_over and earlier != signal.SIG_IGN and signal.getsignal(signum) == self._note:
            # The default action is due: restore it and raise the signal again.
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


@dataclass(frozen=True, slots=True)
class Destinations:
    """The destinations of a step. False if there are none.

    Attributes:
        tiers: numbers of tiers, ascending.
        root: whether it is saved to the root.
    """

    tiers: tuple[int, ...]
    root: bool

    def __bool__(self) -> bool:
        return self.root or bool(self.tiers)


class DestinationChoice:
    """Chooses the destinations of steps: the same on all ranks, because all skip the same steps. Local.

    >>> from megackpt.run.checkpointer import Tier
    >>> choice = DestinationChoice(Tiers([Tier("a", every=2)], root_every=4))
    >>> choice.of(2), choice.of(3, to_root=True)
    (Destinations(tiers=(0,), root=False), Destinations(tiers=(), root=True))
    >>> choice.skipped(choice.of(4))
    >>> choice.of(5)
    Destinations(tiers=(0,), root=True)
    """

    def __init__(self, tiers: Tiers) -> None:
        self._root_every = tiers.root_every
        self._tiers = tiers.tiers
        self._deferred = Destinations((), root=False)  # destinations of a skipped step

    @property
    def depends_on_step(self) -> bool:
        """Whether steps may have different destinations, even if `to_root` is None."""
        return bool(self._tiers) or self._root_every > 1

    def of(self, step: int, *, to_root: bool | None = None, is_signalled: bool = False) -> Destinations:
        """Return the destinations of a step.

        Args:
            step: its number.
            to_root: whether it is saved to the root; None: only if it is due there.
            is_signalled: whether it is saved because of a signal; then it is due in the root.
        """
        if to_root is None:
            to_root = step % self._root_every == 0 or is_signalled or self._deferred.root
        due = (n for n, tier in enumerate(self._tiers) if step % tier.every == 0 or n in self._deferred.tiers)
        return Destinations(tuple(due), root=to_root)

    def skipped(self, destinations: Destinations) -> None:
        """Note that a step was skipped: the next step is saved to its destinations instead."""
        tiers = {*self._deferred.tiers, *destinations.tiers}
        self._deferred = Destinations(tuple(sorted(tiers)), root=self._deferred.root or destinations.root)

    def saved(self, destinations: Destinations) -> None:
        """Note that a step is saved to these destinations."""
        tiers = tuple(n for n in self._deferred.tiers if n not in destinations.tiers)
        self._deferred = Destinations(tiers, root=self._deferred.root and not destinations.root)
