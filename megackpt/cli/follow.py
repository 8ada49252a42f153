"""`megackpt ls --follow`: a line for each new step of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rich.filesize import decimal

from megackpt.cli.run_steps import Step, age_as_text

_EVERY_S = 5.0  # between two looks


def follow_steps(look: Callable[[], Sequence[Step]], show: Callable[[str], None]) -> None:
    """Print the last step, then each new one, until the process is interrupted."""
    seen: dict[int, float] = {}
    while True:
        for line in new_lines(look(), seen, now=time.time()):
            show(line)
        time.sleep(_EVERY_S)


def new_lines(steps: Sequence[Step], seen: dict[int, float], *, now: float) -> Iterator[str]:
    """Yield a line for each step that was committed since the last call; the first call shows one step.

    Args:
        steps: all steps.
        seen: the time of the commit of each step that was seen before; new ones are added.
        now: seconds since 1970.
    """
    known = [(now - step.age_s, step) for step in steps if step.age_s is not None and _is_committed(step)]
    # Ages are measured, so the time of a commit differs by a little from look to look.
    new = [(when, step) for when, step in sorted(known, key=lambda row: row[0]) if _is_new(step, when, seen)]
    shown = new if seen else new[-1:]
    times = sorted(when for when, step in known if not step.abandoned)
    for when, step in shown:
        before = [other for other in times if other < when - 1e-3]
        yield _line(step, when, before[-1] if before else None, now=now)
    seen |= {step.step: when for when, step in new}


def _is_committed(step: Step) -> bool:
    return step.state not in ("incomplete", "unreadable")


def _is_new(step: Step, when: float, seen: dict[int, float]) -> bool:
    return step.step not in seen or when > seen[step.step] + 1.0


def _line(step: Step, when: float, before: float | None, *, now: float) -> str:
    took = "" if step.took_s is None else f", took {step.took_s:.1f} s"
    damage = f"; DAMAGED: {step.damage}" if step.damage else ""
    text = f"{_clock(when)}  step {step.step} saved, {decimal(step.nbytes)}{took}{damage}"
    if before is None:
        return f"{text}; it is the first, so nothing is known about the next"
    distance = when - before
    due = when + distance
    state = f"next due {_clock(due)}" if due >= now else f"next was due {age_as_text(now - due)} ago"
    return f"{text}; {age_as_text(distance)} after the one before; {state}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
