"""`megackpt ls`: the steps of a run."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.filesize import decimal

from megackpt.checkpointer import Checkpointer
from megackpt.cli.frame import EXIT_CODES, json_option, say
from megackpt.cli.places import check_root
from megackpt.cli.tables import show, table_of
from megackpt.engine.manifest import read_manifest
from megackpt.errors import CheckpointError, NotACheckpointError
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import LocalStore, checked_path, is_object_url

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A directory of a step.

    Attributes:
        step: its number.
        state: `committed`; `torn`, if its save or its removal did not finish; `unreadable`, if its commit is
            damaged.
        latest: whether it is the newest committed one.
        age_s: seconds since it was committed, or last written to.
        nbytes: bytes of its files.
        format: backend and version; None unless committed.
        world_size: number of ranks that saved it, where its commit says so.
        pinned: whether nothing may remove it.
        metrics: what it was saved with; as text, where it is no finite number.
    """

    step: int
    state: str
    latest: bool
    age_s: float
    nbytes: int
    format: str | None
    world_size: int | None
    pinned: bool
    metrics: dict[str, float | str]


@click.command(name="ls", short_help="List the steps of a run.", epilog=EXIT_CODES)
@click.argument("root", metavar="ROOT")
@json_option
def command(root: str, *, as_json: bool) -> None:
    """List the steps that a Checkpointer keeps in the directory ROOT, oldest first.

    A step that is torn holds what a save left that did not finish, or is being written right now: it is never
    loaded. The latest is the newest that is committed.
    """
    if is_object_url(root):
        raise click.UsageError(
            f"{root}: only directories are listed. `megackpt pin {root} --list` takes an URL."
        )
    steps = find_steps(Path(checked_path(root)))
    latest = next((step.step for step in steps if step.latest), None)
    if as_json:
        say({"root": root, "latest": latest, "steps": [asdict(s) for s in steps]}, "", as_json=True)
        return
    if not steps:
        say({}, f"{root}: no steps.", as_json=False)
        return
    columns = ("age", "size", "ranks")
    left = ("step", "state", "format", "metrics")
    show(table_of(root, map(_cells, steps), left=left, right=columns))


def find_steps(root: Path) -> list[Step]:
    """Return the steps below a directory, ascending.

    Raises:
        NotACheckpointError: it is no directory, or is itself a checkpoint.
    """
    check_root(str(root))
    if (root / MANIFEST).is_file():
        raise NotACheckpointError(
            f"{root} is a single checkpoint and has no steps. Look into it with `megackpt inspect`, or name "
            f"the directory above it.",
            path=str(root),
        )
    checkpointer = Checkpointer(root)
    found = checkpointer.scan()
    newest = found.committed[-1] if found.committed else None
    pins = checkpointer.pins()
    steps = []
    for step in sorted({*found.committed, *found.torn}):
        described = _step(
            checkpointer.directory(step),
            step,
            is_committed=step in found.committed,
            latest=step == newest,
            pinned=step in pins,
            metrics=checkpointer.metrics(step),
        )
        steps += [described] if described is not None else []
    return steps


def _step(
    directory: Path,
    step: int,
    *,
    is_committed: bool,
    latest: bool,
    pinned: bool,
    metrics: dict[str, float],
) -> Step | None:
    """Describe a step; None if it is gone meanwhile."""
    state, backend, world_size = ("committed" if is_committed else "torn"), None, None
    nbytes, written = _size_and_time(directory)
    if not directory.exists():
        return None
    if is_committed:
        with contextlib.suppress(OSError):
            written = (directory / MANIFEST).stat().st_mtime
        with contextlib.closing(LocalStore(directory)) as store:
            try:
                manifest = read_manifest(store)
            except CheckpointError:
                state = "unreadable"
            else:
                backend = f"{manifest.get('sharded_backend')}:{manifest.get('sharded_backend_version')}"
                ranks = manifest.get("world_size")
                world_size = ranks if type(ranks) is int else None
    return Step(
        step=step,
        state=state,
        latest=latest,
        age_s=max(time.time() - written, 0.0),
        nbytes=nbytes,
        format=backend,
        world_size=world_size,
        pinned=pinned,
        metrics={name: value if math.isfinite(value) else str(value) for name, value in metrics.items()},
    )


def _size_and_time(directory: Path) -> tuple[int, float]:
    """Return the bytes of all files, and when the last was written; files may go meanwhile."""
    nbytes, written = 0, 0.0
    for path, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(path, name))
                nbytes, written = nbytes + found.st_size, max(written, found.st_mtime)
    if not written:
        with contextlib.suppress(OSError):
            written = directory.stat().st_mtime
    return nbytes, written


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.step),
        ", ".join([step.state] + ["latest"] * step.latest + ["pinned"] * step.pinned),
        step.format or "",
        ", ".join(f"{name} {_number(value)}" for name, value in step.metrics.items()),
        age_text(step.age_s),
        decimal(step.nbytes),
        "" if step.world_size is None else str(step.world_size),
    )


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def age_text(seconds: float) -> str:
    """Return a time as a person says it, in the largest unit of which it is two.

    >>> age_text(3.2), age_text(100), age_text(7300), age_text(86400 * 30)
    ('3 s', '100 s', '2 h', '30 d')
    """
    for unit, length in _UNITS:
        if seconds >= 2 * length or unit == "s":
            return f"{int(seconds // length)} {unit}"
    raise AssertionError("seconds are the last unit")
