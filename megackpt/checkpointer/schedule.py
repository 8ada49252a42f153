"""When a step is saved, and where to: the same answer on all ranks.

Multiples of steps need no communication. Time and signals do: each rank sends 248 bytes to each other, about
once a second, at a step that rank 0 chose in the last exchange.
"""

from __future__ import annotations

import signal
import time
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from megackpt.checkpointer.options import MAX_SIGNALS, SaveSchedule, Tiers
from megackpt.comm import Group, Numbers, run_and_compare
from megackpt.errors import DeclarationError

_MOST_STEPS_APART = 100  # if steps become slower, ranks exchange times after this many of them


class SaveTrigger:
    """Answers `should_save`, and remembers what was saved last and which signals were agreed on.

    clock gives seconds; that of rank 0 counts.
    """

    def __init__(
        self, schedule: SaveSchedule, signals: SignalWatch, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._schedule = schedule
        self._signals = signals
        self._clock = clock
        self._since: int | None = None  # the step that was saved or loaded last
        self._since_s = clock()
        self._answer: tuple[int, bool] | None = None  # to the last question
        self._next_meeting = 0
        self._met: tuple[int, float] | None = None  # step and time of the last meeting
        self._apart = 1
        self._exit_signal: int | None = None
        self._is_signalled = False

    @property
    def exit_signal(self) -> int | None:
        """The signal that asks to end after a save, once all ranks know of it."""
        return self._exit_signal

    @property
    def is_signalled(self) -> bool:
        """Whether a signal has asked for a save, and none was tried since; the same on all ranks."""
        return self._is_signalled

    def should_save(self, step: int, group: Callable[[], Group]) -> bool:
        """Say whether a step is due. Collective over the group, at some steps.

        Raises:
            DeclarationError: ranks ask about different steps, or have different options.
            RankFailedError: a rank did not answer before the deadline.
        """
        if self._answer is not None and self._answer[0] == step:
            return self._answer[1]
        if self._since is None:
            self._since = max(step - 1, 0)
        due = passes_multiple(self._schedule.steps, step=step, since=self._since)
        if self._meets and step >= self._next_meeting:
            due = self._agree(step, group()) or due
        due = due or self._is_signalled
        due = due and step != self._since  # what is saved already
        self._answer = step, due
        return due

    def saved(self, step: int) -> None:
        """Take note that a save of a step was tried: the next is due after the interval, if it failed too."""
        self._begin_anew(step)
        for signum in self._signals.signals:
            if not asks_to_exit(signum):  # what came while this step was saved is served by that
                self._signals.serve(signum)

    def loaded(self, step: int) -> None:
        """Take note that training goes on from a step."""
        self._begin_anew(step)
        self._next_meeting, self._met, self._apart = 0, None, 1

    def _begin_anew(self, step: int) -> None:
        self._since, self._since_s, self._answer = step, self._clock(), None
        self._is_signalled = False

    @property
    def _meets(self) -> bool:
        return self._schedule.seconds is not None or bool(self._signals.signals)

    def _agree(self, step: int, group: Group) -> bool:
        signals = self._signals.signals
        settings = zlib.crc32(repr((self._schedule, signals)).encode())

        def say() -> Numbers:
            timed, apart = self._say_of_time(step) if group.rank == 0 else (0, 0)
            apart = 1 if group.size == 1 else apart  # to meet costs nothing then
            received = self._signals.received()
            return Numbers((step, settings), (timed, apart, *received, *[0] * (MAX_SIGNALS - len(received))))

        found = run_and_compare(
            group, say, equal=2, largest=2 + MAX_SIGNALS, doing="agreeing whether to save"
        )
        if not all(found.equal):
            what = "the same schedule" if found.equal[0] else "the same step"
            raise DeclarationError(
                f"Ranks differ in what they ask should_save or maybe_save: give {what} on all of them, and "
                f"call it on all ranks at every step (this is rank {group.rank}, step {step}).",
                rank=group.rank,
            )
        timed, self._apart, *asked = found.largest
        self._next_meeting = step + self._apart
        self._met = step, self._clock()
        received = [signum for signum, is_set in zip(signals, asked, strict=False) if is_set]
        for signum in received:
            self._signals.serve(signum)
            if asks_to_exit(signum) and self._exit_signal is None:
                self._exit_signal = signum
        self._is_signalled = self._is_signalled or bool(received)
        return bool(timed or received)

    def _say_of_time(self, step: int) -> tuple[int, int]:
        """Return whether the time has come, and in how many steps to meet again."""
        now, seconds = self._clock(), self._schedule.seconds
        timed = int(seconds is not None and now - self._since_s >= seconds)
        if self._met is None:
            return timed, 1
        apart = steps_until_meeting(
            passed_steps=step - self._met[0],
            passed_s=now - self._met[1],
            before=self._apart,
            agree_s=self._schedule.agree_s,
        )
        return timed, apart


def passes_multiple(steps: int | None, *, step: int, since: int) -> bool:
    """Say whether there is a multiple of steps after since, up to step.

    >>> passes_multiple(100, step=100, since=99), passes_multiple(100, step=199, since=100)
    (True, False)
    """
    return steps is not None and step // steps > since // steps


def steps_until_meeting(*, passed_steps: int, passed_s: float, before: int, agree_s: float) -> int:
    """Return after how many steps ranks are to meet again, so that about agree_s pass until then.

    passed_steps took passed_s; before is what this returned last time. It at most doubles, so that a few fast
    steps do not put the next meeting far away.

    >>> steps_until_meeting(passed_steps=8, passed_s=0.2, before=8, agree_s=1.0)
    16
    >>> steps_until_meeting(passed_steps=8, passed_s=40.0, before=8, agree_s=1.0)
    1
    """
    most = min(2 * before, _MOST_STEPS_APART)
    fitting = most if passed_s <= 0 else min(most, int(agree_s * max(passed_steps, 1) / passed_s))
    return max(1, fitting)


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


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where a step goes.

    Attributes:
        tiers: numbers of tiers, ascending.
        root: whether to the root.
    """

    tiers: tuple[int, ...]
    root: bool

    def __bool__(self) -> bool:
        return self.root or bool(self.tiers)


class DestinationChoice:
    """Says where steps go; the same on all ranks, which skip the same steps. Local.

    >>> intervals = Intervals(Tiers([Tier("a", every=2)], root_every=4))
    >>> intervals.of(2), intervals.of(3, to_root=True)
    (Destinations(tiers=(0,), root=False), Destinations(tiers=(), root=True))
    >>> intervals.skipped(intervals.of(4))
    >>> intervals.of(5)
    Destinations(tiers=(0,), root=True)
    """

    def __init__(self, tiers: Tiers) -> None:
        self._root_every = tiers.root_every
        self._tiers = tiers.tiers
        self._owed = Destinations((), root=False)

    def of(self, step: int, *, to_root: bool | None = None, is_signalled: bool = False) -> Destinations:
        """Return where a step goes. to_root says so for the root, a signal where that is None."""
        if to_root is None:
            to_root = step % self._root_every == 0 or is_signalled or self._owed.root
        due = (n for n, tier in enumerate(self._tiers) if step % tier.every == 0 or n in self._owed.tiers)
        return Destinations(tuple(due), root=to_root)

    def skipped(self, what: Destinations) -> None:
        """Note that a step did not go where it was to: then the next one does."""
        tiers = {*self._owed.tiers, *what.tiers}
        self._owed = Destinations(tuple(sorted(tiers)), root=self._owed.root or what.root)

    def served(self, what: Destinations) -> None:
        """Note that a step goes there."""
        tiers = tuple(n for n in self._owed.tiers if n not in what.tiers)
        self._owed = Destinations(tiers, root=self._owed.root and not what.root)
