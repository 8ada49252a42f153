"""Going back to an older step: newer steps are moved aside or removed. Local, for one process at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megackpt.engine.checkpoint.origins import PlacedStep
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.checkpoint.steps import step_name
from megackpt.errors import DeclarationError, NotACheckpointError, UnsupportedError
from megackpt.run.checkpointer.root import (
    NO_STEPS,
    RunRoot,
    read_metrics,
    remove_metrics,
    remove_pin,
    write_metrics,
    write_pin,
    write_tracker,
)


def steps_after(step: int, steps: Sequence[PlacedStep[Any]], *, where: str) -> tuple[int, ...]:
    """Return the committed steps that have to go so that a restart takes a step, ascending. Pure.

    These are all steps with greater numbers, and those of newer branches.

    Raises:
        NotACheckpointError: the step is not committed.
    """
    targets = [placed for placed in steps if placed.step == step]
    if not targets:
        known = ", ".join(str(placed.step) for placed in sorted(steps, key=lambda p: p.step))
        advice = f"Name one of the committed steps: {known}." if known else NO_STEPS
        raise NotACheckpointError(f"{where} has no committed step {step}. {advice}", path=where)
    branch = _branch(targets[0])
    return tuple(sorted(p.step for p in steps if p.step > step or (p.step < step and _branch(p) > branch)))


def _branch(placed: PlacedStep[Any]) -> int:
    return 0 if placed.origin is None else placed.origin.branch


def move_aside(run: RunRoot, steps: Sequence[int]) -> str:
    """Move steps with their metrics and pins to a new directory in the root, the newest first; return it.

    Raises:
        UnsupportedError: the root is not on a file system.
        StorageError: a step could not be moved; those moved before stay there.
    """
    directories = run.directories
    if not isinstance(directories, LocalSteps):
        raise UnsupportedError(
            f"{directories.location} is not on a file system, so its steps cannot be moved. Remove them with "
            f"`megackpt rollback --remove`, or copy them first with the tools of the store.",
            path=directories.location,
        )
    aside = RunRoot(directories.new_directory("rolled-back"))
    pins = run.pins()
    for step in sorted(steps, reverse=True):
        if metrics := read_metrics(directories.root, step):
            write_metrics(aside.directories.root, step, metrics)
        directories.move(step_name(step), aside.directories.location)
        if step in pins:
            write_pin(aside.directories.root, step)
        _forget(run, step)
    return aside.directories.location


def remove_steps(run: RunRoot, steps: Sequence[int]) -> None:
    """Remove steps with their metrics, the newest first.

    Raises:
        DeclarationError: a step is pinned; nothing is removed.
        StorageError: a step could not be removed.
    """
    where = run.directories.location
    pinned = sorted(set(steps) & set(run.pins()))
    if pinned:
        listed = ", ".join(map(str, pinned))
        raise DeclarationError(
            f"{where}: the steps {listed} are pinned, so they are not removed. Unpin them with `megackpt pin "
            f"{where} STEP --remove`, or move them aside: leave out --remove.",
            path=where,
        )
    for step in sorted(steps, reverse=True):
        run.directories.remove(step_name(step))
        _forget(run, step)


def update_tracker(run: RunRoot) -> int | None:
    """Write the step that a restart takes into the tracker, and return it."""
    newest = run.tree().newest
    write_tracker(run.directories.root, newest)
    return newest


def _forget(run: RunRoot, step: int) -> None:
    # A later save of this number must not find them.
    remove_metrics(run.directories.root, step)
    remove_pin(run.directories.root, step)
