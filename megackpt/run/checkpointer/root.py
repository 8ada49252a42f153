"""The root of a run: its steps, and small files about them. No ranks are needed.

The small files are next to the steps, so formats need not know of them. Files of one kind share a prefix, so
one listing finds all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from megackpt.engine.checkpoint.origins import PlacedStep, StepOrigin, StepTree, read_origin, step_tree
from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.checkpoint.steps import StepDirectories, step_name, step_of
from megackpt.errors import DeclarationError, FormatError, NotACheckpointError, UnsupportedError
from megackpt.ground.arguments import check_flag, checked_step
from megackpt.run.local import load_content_metadata
from megackpt.storage import ObjectOptions, Store, is_url

NO_STEPS = "It has no committed step. Name the directory that a Checkpointer saves to."
log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_METRICS = ".megackpt/metrics/"
_PINS = ".megackpt/pins/"
_METRICS_MAX_BYTES = 1024 * 1024
_THREADS = 16  # that read the commits of steps


@dataclass(frozen=True, slots=True)
class StepList:
    """The step directories under a root, sorted.

    Attributes:
        committed: steps that can be loaded.
        incomplete: steps whose save or removal did not finish. A directory with other files than those of a
            save is not among them.
    """

    committed: tuple[int, ...]
    incomplete: tuple[int, ...]


def steps_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the steps of those names that are names of steps, ascending."""
    return tuple(sorted(step for name in names if (step := step_of(name)) is not None))


def scan(directories: StepDirectories) -> StepList:
    """List the steps below a root. Local.

    Raises:
        OSError: the root cannot be listed.
    """
    names = [name for name in directories.names() if step_of(name) is not None]
    committed = set(directories.committed(names))
    incomplete = [name for name in names if name not in committed and directories.is_leftover(name)]
    return StepList(steps_of(committed), steps_of(incomplete))


def read_tree(
    directories: StepDirectories,
    committed: Iterable[int],
    *,
    known: dict[int, StepOrigin | None] | None = None,
) -> StepTree[str]:
    """Read the origins of committed steps below a root; the location of each is the root. Local.

    Args:
        directories: the step directories under the root.
        committed: the steps. One that is gone meanwhile is left out.
        known: origins that were read before and do not change; those that are read now are added.

    Raises:
        OSError: a commit cannot be read.
    """
    known = {} if known is None else known
    steps = list(committed)
    unknown = [step for step in steps if step not in known]
    if unknown:
        read_one = partial(_origins_of, directories)
        if threading.main_thread().is_alive():
            count = min(_THREADS, len(unknown))
            with ThreadPoolExecutor(count, thread_name_prefix="megackpt-origins") as threads:
                read = list(threads.map(read_one, unknown))
        else:  # the last save of a script, when Python starts no more threads
            read = list(map(read_one, unknown))
        for step, origins in zip(unknown, read, strict=True):
            for origin in origins:
                known[step] = origin
    where = directories.location
    return step_tree([PlacedStep(step, known[step], where) for step in steps if step in known])


def _origins_of(directories: StepDirectories, step: int) -> list[StepOrigin | None]:
    """Return the origin of a step; an empty list if it was removed meanwhile."""
    try:
        with contextlib.closing(directories.open(step_name(step))) as store:
            return [read_origin(store)]
    except NotACheckpointError:
        return []


def newest_step(directories: StepDirectories) -> int | None:
    """Return the step that a restart takes; log a warning for each newer incomplete step. Local."""
    steps = scan(directories)
    newest = read_tree(directories, steps.committed).newest
    for step in steps.incomplete:
        if newest is None or step > newest:
            log.warning(
                "%s/%s is not committed (its save did not finish) and is ignored; the newest committed "
                "step is %s.",
                directories.location,
                step_name(step),
                newest,
            )
    return newest


class RunRoot:
    """Numbered steps under a root, `iter_0000100` for step 100. Every method is local.

    Any process can use it, also while a job is running.

    Args:
        root: a directory, the URL of one in an object store, or a `Store`.
        objects: options of the object store, if the root is a URL.
        allow_unsafe_pickle: as in `LoadOptions`, for `content_metadata`.

    Attributes:
        path: the directory, or the URL as text.
        directories: the step directories under the root.
        store: the root, if it was given as a `Store`; None for a path or a URL.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        objects: ObjectOptions | None = None,
        allow_unsafe_pickle: bool = False,
    ) -> None:
        self.directories = step_directories(root, objects=objects)
        self.store = None if isinstance(root, (str, os.PathLike)) else root
        check_flag("allow_unsafe_pickle", allow_unsafe_pickle)
        self._allow_unsafe_pickle = allow_unsafe_pickle
        location = self.directories.location
        is_path = isinstance(root, (str, os.PathLike)) and not is_url(os.fspath(root))
        self.path: Path | str = Path(location) if is_path else location

    @property
    def common_location(self) -> str | None:
        """The location that must be equal on all ranks; None for a store, which each may name differently."""
        return self.directories.location if self.store is None else None

    def location(self, step: int) -> str:
        """Return the path or URL of a step, even if the step does not exist."""
        return f"{self.directories.location}/{step_name(checked_step(step))}"

    def directory(self, step: int) -> Path:
        """Return the directory of a step, even if the step does not exist.

        Raises:
            UnsupportedError: the root is a URL; see `location`.
        """
        if not isinstance(self.path, Path):
            raise UnsupportedError(
                f"{self.path} is not on a file system, so its steps have no directories. "
                f"Use location({step})."
            )
        return self.path / step_name(checked_step(step))

    def scan(self) -> StepList:
        """Return the committed and the incomplete steps."""
        return scan(self.directories)

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, ascending."""
        return self.scan().committed

    def latest(self) -> int | None:
        """Return the step that a restart takes, or None; log a warning for each newer incomplete one."""
        return newest_step(self.directories)

    def tree(self) -> StepTree[str]:
        """Return the committed steps: those of the line that a restart continues, and abandoned ones."""
        return read_tree(self.directories, self.steps())

    def pin(self, step: int) -> None:
        """Protect a committed step from removal until `unpin`. One rank calls it.

        Raises:
            NotACheckpointError: the step is not committed, or another process is removing it.
            StorageError: the pin could not be written.
        """
        step = checked_step(step)
        self._check_committed(step)
        write_pin(self.directories.root, step)
        try:
            self._check_committed(step)  # a removal that began before the pin was written continues
        except NotACheckpointError:
            remove_pin(self.directories.root, step)
            raise

    def unpin(self, step: int) -> None:
        """Permit the next save to remove a step again. One rank calls it.

        Does nothing if the step is not pinned.
        """
        remove_pin(self.directories.root, checked_step(step))

    def pins(self) -> tuple[int, ...]:
        """Return the pinned steps, ascending."""
        return tuple(sorted(read_pins(self.directories.root)))

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; an empty dict if it was saved without metrics."""
        return read_metrics(self.directories.root, checked_step(step))

    def content_metadata(self, step: int) -> Any:
        """Return the `content_metadata` of a step."""
        with contextlib.closing(self.directories.open(step_name(checked_step(step)))) as store:
            return load_content_metadata(store, allow_unsafe_pickle=self._allow_unsafe_pickle)

    def _check_committed(self, step: int) -> None:
        if not self.directories.committed([step_name(step)]):
            steps = ", ".join(map(str, self.steps()))
            advice = f"Pin one of the committed steps: {steps}." if steps else NO_STEPS
            raise NotACheckpointError(
                f"{self.location(step)} is not committed, so it cannot be pinned. {advice}",
                path=self.location(step),
            )


# Metrics of steps: `.megackpt/metrics/iter_0000100.json`. They are written before the step is committed. So
# every committed step that was saved with metrics has them, also after a restart.


def checked_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return metrics as plain numbers. Tensors and arrays of one element are accepted.

    Raises:
        DeclarationError: metrics is not a mapping, a name is not text, or a value is not a single number.
    """
    if not isinstance(metrics, Mapping):
        raise DeclarationError(f"metrics is {metrics!r}; give numbers by name, as {{'loss': 2.5}}.")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DeclarationError(f"metrics[{name!r}] is {value!r}; give a single number.") from error
        if not isinstance(name, str):
            raise DeclarationError(f"metrics has the name {name!r}; give names as text.")
        numbers[name] = number
    return numbers


def write_metrics(root: Store, step: int, metrics: Mapping[str, float]) -> None:
    """Store the metrics of a step durably, in place of earlier ones."""
    # JSON has no NaN and no infinity: they are stored as text. They are never the best.
    plain = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    root.create()
    root.replace(_metrics_file(step), json.dumps(plain, sort_keys=True).encode())


def read_metrics(root: Store, step: int) -> dict[str, float]:
    """Return the metrics of a step; an empty dict if there are none, or if they are damaged."""
    if not root.exists(_metrics_file(step)):
        return {}
    try:
        document: Any = json.loads(root.read(_metrics_file(step), max_bytes=_METRICS_MAX_BYTES))
        return {str(name): float(value) for name, value in document.items()}
    except (FormatError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def steps_with_metrics(root: Store) -> tuple[int, ...]:
    """Return the steps that have metrics, ascending, including those that do not exist themselves."""
    files = (name.removeprefix(_METRICS) for name in root.names(_METRICS))
    return steps_of(name.removesuffix(".json") for name in files if name.endswith(".json"))


def remove_metrics(root: Store, step: int) -> None:
    """Remove the metrics of a step durably, if there are any."""
    root.delete([_metrics_file(step)])
    root.sync()


def _metrics_file(step: int) -> str:
    return f"{_METRICS}{step_name(step)}.json"


# Pins: `.megackpt/pins/iter_0000100`. A pin is the presence of this file, with any content. So a crash cannot
# leave an incomplete pin.


def read_pins(root: Store) -> frozenset[int]:
    """Return the pinned steps, including those that do not exist themselves."""
    return frozenset(steps_of(name.removeprefix(_PINS) for name in root.names(_PINS)))


def is_pinned(root: Store, step: int) -> bool:
    """Return whether a step is pinned now."""
    return root.exists(_pin_file(step))


def write_pin(root: Store, step: int) -> None:
    """Pin a step durably."""
    if not is_pinned(root, step):
        root.write(_pin_file(step), b"megackpt never removes this step\n")
        root.sync()


def remove_pin(root: Store, step: int) -> None:
    """Remove the pin of a step durably, if there is one."""
    root.delete([_pin_file(step)])
    root.sync()


def _pin_file(step: int) -> str:
    return f"{_PINS}{step_name(step)}"


# The tracker: the newest committed step, for scripts and for Megatron-LM. It is written after a commit, and
# megackpt never reads it, because only commits count.


def write_tracker(root: Store, newest: int | None) -> None:
    """Write the newest step into the tracker, atomically; without a step remove the tracker.

    Source: Megatron-LM `get_checkpoint_tracker_filename` (the name, and a decimal number as content).
    """
    if newest is not None:
        root.replace(TRACKER, str(newest).encode())
        return
    root.delete([TRACKER])
    root.sync()
