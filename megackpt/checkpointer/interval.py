"""When a step is due to be saved, as pure decisions.

Owns the option and the arithmetic. Clocks, signals and other ranks are up to `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.arguments import check_count, check_seconds

_MOST_STEPS_APART = 100  # if steps become slower, the next meeting is this many of them away


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval:
    """How often to save: whichever comes first.

    Attributes:
        steps: at each multiple of so many steps.
        seconds: when so many seconds have passed since the last save, by rank 0's clock.
        agree_s: how much training may pass, in seconds, until ranks agree that the time or a signal has come.
    """

    steps: int | None = None
    seconds: float | None = None
    agree_s: float = 1.0

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("save_interval.steps", self.steps, otherwise=", or None")
        if self.seconds is not None:
            check_seconds("save_interval.seconds", self.seconds, otherwise=", or None")
        check_seconds("save_interval.agree_s", self.agree_s)


def interval_of(given: int | SaveInterval | None) -> SaveInterval:
    """Return what was given as an interval: a number means steps.

    Raises:
        DeclarationError: it is neither.
    """
    if given is None or isinstance(given, SaveInterval):
        return given or SaveInterval()
    return SaveInterval(steps=given)


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
