"""The files below the root of a run: its steps, and small files about them.

The small files are next to the steps, so formats need not know of them. Files of one kind share a prefix, so
one listing finds all of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from megackpt.engine.checkpoint.steps import StepDirectories, step_name, step_of
from megackpt.errors import DeclarationError, FormatError
from megackpt.storage import Store

log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_METRICS = ".megackpt/metrics/"
_PINS = ".megackpt/pins/"
_METRICS_MAX_BYTES = 1024 * 1024


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


def newest_step(directories: StepDirectories) -> int | None:
    """Return the newest committed step or None; log a warning for each newer incomplete step. Local."""
    steps = scan(directories)
    newest = steps.committed[-1] if steps.committed else None
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
