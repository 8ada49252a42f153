"""`megackpt ls`: the steps of a run."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, print_json, print_result, wants_json
from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars, show, table_of
from megackpt.errors import CheckpointError, NotACheckpointError
from megackpt.formats.registry import recognise
from megackpt.formats.strategy import MANIFEST

if TYPE_CHECKING:
    from megackpt.engine.checkpoint.steps import StepDirectories, StepFile
    from megackpt.storage import Store

_THREADS = 16
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a run.

    Attributes:
        step: its number.
        state: `committed`; `incomplete`, if its save or its removal did not finish; `unreadable`, if its
            commit is damaged.
        latest: whether it is the newest committed step.
        age_s: seconds since it was committed, or last written to; None if the store has no times.
        nbytes: bytes of its files.
        format: backend and version; None unless committed.
        world_size: number of ranks that saved it; None if its commit does not name it.
        pinned: whether it is protected from removal.
        metrics: the metrics of the step; as text if they are not finite.
    """

    step: int
    state: str
    latest: bool
    age_s: float | None
    nbytes: int
    format: str | None
    world_size: int | None
    pinned: bool
    metrics: dict[str, float | str]


@click.command(name="ls", epilog=EPILOG)
@click.argument("root", metavar="ROOT")
def command(root: str) -> None:
    """List the steps that a Checkpointer keeps in ROOT, a directory or a URL, oldest first.

    An incomplete step is the leftover of a save that did not finish, or is still being written. It is never
    loaded. The latest step is the newest committed one.
    """
    with ProgressBars("reading the steps") as bars:
        steps = list_steps(root, bars)
    latest = next((step.step for step in steps if step.latest), None)
    if wants_json():
        print_json({"root": root, "latest": latest, "steps": [asdict(s) for s in steps]})
    elif steps:
        columns = ("age", "size", "ranks")
        left = ("step", "state", "format", "metrics")
        show(table_of(root, map(_cells, steps), left=left, right=columns))
    else:
        print_result({}, f"{root}: no steps.")


def list_steps(root: str | os.PathLike[str], bars: ProgressBars | None = None) -> list[Step]:
    """Return the steps in a directory or behind a URL, ascending. If bars are given, they count the steps.

    Raises:
        NotACheckpointError: the location is not a directory, or is itself a checkpoint.
    """
    from megackpt.engine.checkpoint.step_roots import step_directories
    from megackpt.run.checkpointer.root import read_pins, scan

    check_run_root(str(root))
    directories = step_directories(root, objects=None)
    steps = scan(directories)
    has_steps = steps.committed or steps.incomplete
    # Folders of other tools have no metadata.json; to recognise one takes a list of all files.
    if not has_steps and (seen := recognise(directories.root)) is not None:
        raise NotACheckpointError(
            f"{root} has no steps of a Checkpointer: it is {seen.name}. {seen.advice}", path=str(root)
        )
    describe = partial(
        _describe_step, directories, committed=steps.committed, pins=read_pins(directories.root)
    )
    numbers = sorted({*steps.committed, *steps.incomplete})
    return _describe_all(describe, numbers, bars or ProgressBars())


def _describe_all(
    describe: Callable[[int], Step | None], numbers: Sequence[int], bars: ProgressBars
) -> list[Step]:
    bars.begin_count("reading steps", len(numbers))
    described = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="megackpt-ls") as threads:
        for step in threads.map(describe, numbers):
            described += [] if step is None else [step]
            bars.advance(1)
    return described


def _describe_step(
    directories: StepDirectories, step: int, *, committed: Sequence[int], pins: frozenset[int]
) -> Step | None:
    """Return the description of a step; None if it was removed meanwhile."""
    from megackpt.engine.checkpoint.steps import step_name
    from megackpt.run.checkpointer.root import read_metrics

    files = directories.files(step_name(step))
    if files is None:
        return None
    state, backend, world_size = "incomplete", None, None
    if step in committed:
        with contextlib.closing(directories.open(step_name(step))) as store:
            state, backend, world_size = _describe_commit(store)
    metrics = read_metrics(directories.root, step)
    return Step(
        step=step,
        state=state,
        latest=bool(committed) and step == committed[-1],
        age_s=_age_s(files) if files else directories.idle_s(step_name(step)),
        nbytes=sum(file.nbytes for file in files),
        format=backend,
        world_size=world_size,
        pinned=step in pins,
        metrics={name: value if math.isfinite(value) else str(value) for name, value in metrics.items()},
    )


def _describe_commit(store: Store) -> tuple[str, str | None, int | None]:
    """Return the state of a committed step, its format and its number of ranks."""
    from megackpt.engine.checkpoint.manifest import read_manifest

    try:
        manifest = read_manifest(store)
    except CheckpointError:
        return "unreadable", None, None
    ranks = manifest.get("world_size")
    backend = f"{manifest.get('sharded_backend')}:{manifest.get('sharded_backend_version')}"
    return "committed", backend, ranks if type(ranks) is int else None


def _age_s(files: Sequence[StepFile]) -> float | None:
    """Return seconds since a step was committed, or last written to; None if the store has no times."""
    times = [file.modified_s for file in files if file.modified_s is not None and file.name == MANIFEST]
    times = times or [file.modified_s for file in files if file.modified_s is not None]
    return max(time.time() - max(times), 0.0) if times else None


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.step),
        ", ".join([step.state] + ["latest"] * step.latest + ["pinned"] * step.pinned),
        step.format or "",
        ", ".join(f"{name} {_number(value)}" for name, value in step.metrics.items()),
        "" if step.age_s is None else age_as_text(step.age_s),
        decimal(step.nbytes),
        "" if step.world_size is None else str(step.world_size),
    )


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def age_as_text(seconds: float) -> str:
    """Return a time as text, in the largest unit that gives at least two.

    >>> age_as_text(3.2), age_as_text(100), age_as_text(7300), age_as_text(86400 * 30)
    ('3 s', '100 s', '2 h', '30 d')
    """
    for unit, length in _UNITS:
        if seconds >= 2 * length or unit == "s":
            return f"{int(seconds // length)} {unit}"
    raise AssertionError("seconds are the last unit")
