"""The steps of a run, as commands show them; damage that sizes show: missing files, other sizes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars
from megackpt.errors import CheckpointError, NotACheckpointError
from megackpt.formats.registry import recognise
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import LocalStore, Store

if TYPE_CHECKING:
    from megackpt.engine.checkpoint.origins import StepTree
    from megackpt.engine.checkpoint.steps import StepDirectories, StepFile

_THREADS = 16
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_MAX_INDEX_BYTES = 16 * 1024 * 1024  # a larger index is not read for a list of steps


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


def check_not_foreign(root: str | os.PathLike[str], store: Store) -> None:
    """Check that a directory without steps is no folder of another tool. It takes a list of all files.

    Raises:
        NotACheckpointError: it is one; the text names the tool.
    """
    if (seen := recognise(store)) is not None:
        raise NotACheckpointError(
            f"{root} has no steps of a Checkpointer: it is {seen.name}. {seen.advice}", path=str(root)
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
    if not (steps.committed or steps.incomplete):
        check_not_foreign(root, directories.root)
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


def wrong_size(store: Store, files: Mapping[str, int]) -> str:
    """Return the first file that is wrong, as text; empty if no size is wrong. Local.

    The commit is read, and on a file system a small index. In an object store only files that the commit
    names are compared: the index would take another request for each step.

    Args:
        store: a committed step.
        files: its files, with their sizes in bytes.
    """
    from megackpt.engine.checkpoint.manifest import read_manifest
    from megackpt.formats.registry import load_strategy

    try:
        manifest = read_manifest(store)
        entries = load_strategy(manifest, where=store.location).published_entries(store, manifest)
        named = _named_files(entries)
        if wrong := _first_wrong(named, files):
            return wrong
        index = entries.get("index")
        nbytes = index.get("nbytes", 0) if isinstance(index, dict) else 0
        if isinstance(store, LocalStore) and isinstance(nbytes, int) and nbytes <= _MAX_INDEX_BYTES:
            exact, least = _files_of_chunks(store)
            wrong = _first_wrong(exact, files, least)
            return f"{wrong} (a tier has only the files of its node)" if wrong.endswith("missing") else wrong
    except CheckpointError as error:
        return " ".join(str(error).split())
    return ""


def _named_files(entries: Mapping[str, Any]) -> dict[str, int]:
    """Return the files that a commit names, with their sizes."""
    return {
        entry["file"]: entry["nbytes"]
        for entry in entries.values()
        if isinstance(entry, dict) and isinstance(entry.get("file"), str) and type(entry.get("nbytes")) is int
    }


def _files_of_chunks(store: Store) -> tuple[dict[str, int], dict[str, int]]:
    """Return the files of chunks whose size the format knows; and how long the others must be at least."""
    from megackpt.engine.checkpoint.opening import open_checkpoint

    contents = open_checkpoint(store)
    ranges = contents.chunks(sorted(contents.arrays)).file_ranges()
    if ranges is None:
        return {}, {}
    least = np.zeros(len(ranges.files), np.int64)
    np.maximum.at(least, ranges.file, ranges.stop)
    exact = {name: int(n) for name, n in zip(ranges.files, ranges.nbytes, strict=True) if n >= 0}
    return exact, {name: int(n) for name, n in zip(ranges.files, least, strict=True) if name not in exact}


def _first_wrong(
    exact: Mapping[str, int], files: Mapping[str, int], least: Mapping[str, int] | None = None
) -> str:
    least = least or {}
    for name, nbytes in sorted({**exact, **least}.items()):
        size = files.get(name)
        if size is None:
            return f"{name} is missing"
        if size < nbytes or (size > nbytes and name in exact):
            return f"{name} has {size:,} bytes instead of {nbytes:,}"
    return ""


def age_as_text(seconds: float) -> str:
    """Return a time as text, in the largest unit that gives at least two.

    >>> age_as_text(3.2), age_as_text(100), age_as_text(7300), age_as_text(86400 * 30)
    ('3 s', '100 s', '2 h', '30 d')
    """
    for unit, length in _UNITS:
        if seconds >= 2 * length or unit == "s":
            return f"{int(seconds // length)} {unit}"
    raise AssertionError("seconds are the last unit")
