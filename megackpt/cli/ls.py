"""`megackpt ls`: the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import click
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, INTERRUPTED, print_json, print_result, wants_json
from megackpt.cli.output import ProgressBars, counted, show, table_of
from megackpt.cli.run_steps import Step, age_as_text, list_steps
from megackpt.storage import is_url

# `megackpt ls --follow`: a line for each new step of a run.

_EVERY_S = 5.0  # between two looks


def follow_steps(look: Callable[[], Sequence[Step]], show: Callable[[str], None]) -> None:
    """Print the last step, then each new one, and once when the next is late; until it is interrupted."""
    seen: dict[int, float] = {}
    reported = 0  # the step after which none came in time
    while True:
        for line in new_lines(look(), seen, now=time.time()):
            show(line)
        last = max(seen, key=lambda step: seen[step], default=0)
        if last != reported and (line := late_line(seen, now=time.time())):
            show(line)
            reported = last
        time.sleep(_EVERY_S)


def late_line(seen: Mapping[int, float], *, now: float) -> str:
    """Return that no step came within twice the time between the last two; empty if that is not so. Pure.

    Arguments are those of `new_lines`.
    """
    commits = sorted((when, step) for step, when in seen.items())
    if len(commits) < 2:
        return ""
    (before, _), (last, step) = commits[-2:]
    due = last + (last - before)
    if now < due + (last - before):
        return ""
    late = age_as_text(now - due)
    return f"{_clock(now)}  no step since step {step}: the next was due {late} ago. Look at the job"


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


@click.command(name="ls", epilog=EPILOG)
@click.argument("root", metavar="[ROOT]", default=".")
@click.option("--follow", is_flag=True, help="Go on: print a line for each new step, until interrupted.")
def command(root: str, *, follow: bool) -> int:
    """List the steps that a Checkpointer keeps in ROOT, a directory or a URL, oldest first.

    Without ROOT, take the present directory. An incomplete step is the leftover of a save that did not
    finish, or is still being written. It is never loaded. The latest step is the one that a restart takes. A
    step is damaged if files are missing or have a wrong size; `megackpt verify ROOT --all --deep` reads the
    bytes. Steps that a run left behind when it went back to an older one are abandoned. The column `files`
    has the bytes of all files of a step; verify and inspect count those of chunks.

    --follow prints when each step was committed, how long its save took, the bytes of its files, and when the
    next one is due, if saves go on at the same distance. It says so when that one is late.
    """
    if follow and wants_json():
        raise click.UsageError("--follow prints lines until it is interrupted; --json is one document.")
    if follow:
        try:
            follow_steps(lambda: list_steps(root), show)
        except KeyboardInterrupt:
            return INTERRUPTED  # without a text: nothing was left unfinished
    with ProgressBars("reading the steps") as bars:
        steps = list_steps(root, bars)
    latest = next((step.step for step in steps if step.latest), None)
    if wants_json():
        print_json({"root": root, "latest": latest, "steps": [asdict(s) for s in steps]})
    elif steps:
        _show(root, steps)
    else:
        print_result({}, f"{root}: no steps.{_hint_of_empty(root)}")
    return 0


def _show(root: str, steps: Sequence[Step]) -> None:
    columns = ("age", "files", "ranks")
    left = ["step", "state", "format", "metrics"]
    rows = [list(_cells(step)) for step in steps]
    if any(step.branch for step in steps):
        left.insert(2, "branch")
        for row, step in zip(rows, steps, strict=True):
            row.insert(2, _branch_text(step))
    styles = [_style(step) for step in steps]
    show(table_of(root, rows, left=left, right=columns, styles=styles))
    for step in steps:
        if step.damage:
            show(f"Step {step.step}: {step.damage}")
    abandoned = [step for step in steps if step.abandoned]
    if abandoned:
        nbytes = decimal(sum(step.nbytes for step in abandoned))
        show(
            f"{counted(len(abandoned), 'step')} ({nbytes}) of abandoned branches: no restart takes them. "
            f"`megackpt gc {root} --keep-all --abandoned` removes them."
        )


def _branch_text(step: Step) -> str:
    if step.branch is None:
        return ""
    return f"{step.branch}" if step.continues is None else f"{step.branch}, after {step.continues}"


def _style(step: Step) -> str:
    if step.state in ("damaged", "unreadable"):
        return "red"
    if step.state == "incomplete":
        return "yellow"
    return "dim" if step.abandoned else "bold green" if step.latest else "green"


def _hint_of_empty(root: str) -> str:
    """Return what may be wrong if a root has no steps: at a URL nothing tells a new run from a wrong name."""
    if not is_url(root):
        return ""
    return (
        " Nothing is stored below this URL, or no directory iter_0000100 is. Check its spelling; a run "
        "that has not saved yet looks the same."
    )


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.step),
        ", ".join(_words(step)),
        step.format or "",
        ", ".join(f"{name} {_number(value)}" for name, value in step.metrics.items()),
        "" if step.age_s is None else age_as_text(step.age_s),
        decimal(step.nbytes),
        "" if step.world_size is None else str(step.world_size),
    )


def _words(step: Step) -> list[str]:
    marks = {"latest": step.latest, "abandoned": step.abandoned, "pinned": step.pinned}
    return [step.state, *(mark for mark, is_set in marks.items() if is_set)]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
