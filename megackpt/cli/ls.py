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
from megackpt.cli.output import ProgressBars, counted, show, table_of
from megackpt.cli.step_sizes import wrong_size
from megackpt.errors import CheckpointError, NotACheckpointError
from megackpt.formats.registry import recognise
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import is_url

if TYPE_CHECKING:
    from megackpt.engine.checkpoint.origins import StepTree
    from megackpt.engine.checkpoint.steps import StepDirectories, StepFile
    from megackpt.storage import Store

_THREADS = 16
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a run.

    Attributes:
        step: its number.
        state: `committed`; `damaged`, if a file is missing, or has another size than the commit and the index
            say; `incomplete`, if its save or its removal did not finish; `unreadable`, if its commit is
            damaged.
        damage: of a damaged step, the first file that is wrong; else empty.
        latest: whether it is the step that a restart takes.
        abandoned: whether it is committed, and a restart does not come from it.
        branch: the number of its branch; None unless its commit can be read.
        continues: the step that its run loaded or saved before; None if it is not recorded.
        run: id of the run that saved it; empty if it is not recorded.
        took_s: seconds from its first file to its commit; None if they are not known.
        age_s: seconds since it was committed, or last written to; None if the store has no times.
        nbytes: bytes of its files.
        format: backend and version; None unless committed.
        world_size: number of ranks that saved it; None if its commit does not name it.
        pinned: whether it is protected from removal.
        metrics: the metrics of the step; as text if they are not finite.
    """

    step: int
    state: str
    damage: str
    latest: bool
    abandoned: bool
    branch: int | None
    continues: int | None
    run: str
    took_s: float | None
    age_s: float | None
    nbytes: int
    format: str | None
    world_size: int | None
    pinned: bool
    metrics: dict[str, float | str]


@click.command(name="ls", epilog=EPILOG)
@click.argument("root", metavar="[ROOT]", default=".")
@click.option("--follow", is_flag=True, help="Go on: print a line for each new step, until interrupted.")
def command(root: str, *, follow: bool) -> None:
    """List the steps that a Checkpointer keeps in ROOT, a directory or a URL, oldest first.

    Without ROOT, take the present directory. An incomplete step is the leftover of a save that did not
    finish, or is still being written. It is never loaded. The latest step is the one that a restart takes. A
    step is damaged if files are missing or have a wrong size; `megackpt verify ROOT --all --deep` reads the
    bytes. Steps that a run left behind when it went back to an older one are abandoned.

    --follow prints when each step was committed, how long its save took, its size, and when the next one is
    due, if saves go on at the same distance.
    """
    if follow and wants_json():
        raise click.UsageError("--follow prints lines until it is interrupted; --json is one document.")
    if follow:
        from megackpt.cli.follow import follow_steps

        follow_steps(lambda: list_steps(root), show)
        return
    with ProgressBars("reading the steps") as bars:
        steps = list_steps(root, bars)
    latest = next((step.step for step in steps if step.latest), None)
    if wants_json():
        print_json({"root": root, "latest": latest, "steps": [asdict(s) for s in steps]})
    elif steps:
        _show(root, steps)
    else:
        print_result({}, f"{root}: no steps.{_hint_of_empty(root)}")


def _show(root: str, steps: Sequence[Step]) -> None:
    columns = ("age", "size", "ranks")
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


def list_steps(root: str | os.PathLike[str], bars: ProgressBars | None = None) -> list[Step]:
    """Return the steps in a directory or behind a URL, ascending. If bars are given, they count the steps.

    Raises:
        NotACheckpointError: the location is not a directory, or is itself a checkpoint.
    """
    from megackpt.engine.checkpoint.step_roots import step_directories
    from megackpt.run.checkpointer.root import read_pins, read_tree, scan

    check_run_root(str(root))
    directories = step_directories(root, objects=None)
    steps = scan(directories)
    tree = read_tree(directories, steps.committed)
    has_steps = steps.committed or steps.incomplete
    # Folders of other tools have no metadata.json; to recognise one takes a list of all files.
    if not has_steps and (seen := recognise(directories.root)) is not None:
        raise NotACheckpointError(
            f"{root} has no steps of a Checkpointer: it is {seen.name}. {seen.advice}", path=str(root)
        )
    describe = partial(
        _describe_step, directories, committed=steps.committed, tree=tree, pins=read_pins(directories.root)
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
    directories: StepDirectories,
    step: int,
    *,
    committed: Sequence[int],
    tree: StepTree[str],
    pins: frozenset[int],
) -> Step | None:
    """Return the description of a step; None if it was removed meanwhile."""
    from megackpt.engine.checkpoint.steps import step_name
    from megackpt.run.checkpointer.root import read_metrics

    files = directories.files(step_name(step))
    if files is None:
        return None
    state, damage, backend, world_size = "incomplete", "", None, None
    if step in committed:
        with contextlib.closing(directories.open(step_name(step))) as store:
            state, backend, world_size = _describe_commit(store)
            if state == "committed":
                damage = wrong_size(store, {file.name: file.nbytes for file in files})
                state = "damaged" if damage else state
    origins = {placed.step: placed.origin for placed in (*tree.line, *tree.abandoned)}
    origin = origins.get(step)
    metrics = read_metrics(directories.root, step)
    return Step(
        step=step,
        state=state,
        damage=damage,
        latest=step == tree.newest,
        abandoned=any(placed.step == step for placed in tree.abandoned),
        branch=None if origin is None else origin.branch,
        continues=None if origin is None else origin.continues,
        run="" if origin is None else origin.run,
        took_s=_took_s(files) if step in committed else None,
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


def _took_s(files: Sequence[StepFile]) -> float | None:
    """Return the time from the first file that was written last to the commit, in seconds."""
    times = {file.name: file.modified_s for file in files if file.modified_s is not None}
    return max(times[MANIFEST] - min(times.values()), 0.0) if MANIFEST in times else None


def _age_s(files: Sequence[StepFile]) -> float | None:
    """Return seconds since a step was committed, or last written to; None if the store has no times."""
    times = [file.modified_s for file in files if file.modified_s is not None and file.name == MANIFEST]
    times = times or [file.modified_s for file in files if file.modified_s is not None]
    return max(time.time() - max(times), 0.0) if times else None


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


def age_as_text(seconds: float) -> str:
    """Return a time as text, in the largest unit that gives at least two.

    >>> age_as_text(3.2), age_as_text(100), age_as_text(7300), age_as_text(86400 * 30)
    ('3 s', '100 s', '2 h', '30 d')
    """
    for unit, length in _UNITS:
        if seconds >= 2 * length or unit == "s":
            return f"{int(seconds // length)} {unit}"
    raise AssertionError("seconds are the last unit")
