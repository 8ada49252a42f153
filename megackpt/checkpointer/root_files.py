"""What lies below the root of a run: its steps, and small files of the run about them.

The files are written beside the steps, so that formats need not know of them, and those of one kind share a
prefix, so that one listing finds all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from megackpt.engine.checkpoint.steps import StepDirectories, step_name, step_of
from megackpt.errors import DeclarationError, FormatError
from megackpt.storage import Store


@dataclass(frozen=True, slots=True)
class StepList:
    """The step directories under a root, sorted.

    Attributes:
        committed: steps that can be loaded.
        incomplete: steps whose save or removal did not finish. Directories that contain anything else than
            files of a save are not among them.
    """

    committed: tuple[int, ...]
    incomplete: tuple[int, ...]


def steps_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the steps of those names that are names of steps, ascending."""
    return tuple(sorted(step for name in names if (step := step_of(name)) is not None))


def scan(places: StepDirectories) -> StepList:
    """Look at what is below a root. Local.

    Raises:
        OSError: it cannot be listed.
    """
    names = [name for name in places.names() if step_of(name) is not None]
    committed = set(places.committed(names))
    incomplete = [name for name in names if name not in committed and places.is_leftover(name)]
    return StepList(steps_of(committed), steps_of(incomplete))


_METRICS = ".megackpt/metrics/"
_MAX_BYTES = 1024 * 1024


def checked_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors and arrays of one element are taken, too.

    Raises:
        DeclarationError: it is no mapping, a name is no text, or a value no number.
    """
    if not isinstance(metrics, Mapping):
        raise DeclarationError(f"metrics is {metrics!r}; give numbers by name, as {{'loss': 2.5}}.")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DeclarationError(f"metrics[{name!r}] is {value!r}; give a single number.") from error
        if not isinstance(name, str):
            raise DeclarationError(f"metrics has the name {name!r}; give names as text.")
        found[name] = number
    return found


def write_metrics(root: Store, step: int, metrics: Mapping[str, float]) -> None:
    """Store the metrics of a step, durably, instead of what was there."""
    # JSON knows no NaN and no infinity. None of the two is ever the best, but that it was so is kept.
    plain = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    root.create()
    root.replace(_metrics_file(step), json.dumps(plain, sort_keys=True).encode())


def read_metrics(root: Store, step: int) -> dict[str, float]:
    """Return the metrics of a step; none if there are none, or if they are damaged."""
    if not root.exists(_metrics_file(step)):
        return {}
    try:
        said: Any = json.loads(root.read(_metrics_file(step), max_bytes=_MAX_BYTES))
        return {str(name): float(value) for name, value in said.items()}
    except (FormatError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def steps_with_metrics(root: Store) -> tuple[int, ...]:
    """Return the steps that have metrics, whether they exist or not, ascending."""
    files = (name.removeprefix(_METRICS) for name in root.names(_METRICS))
    return steps_of(name.removesuffix(".json") for name in files if name.endswith(".json"))


def forget_metrics(root: Store, step: int) -> None:
    """Remove the metrics of a step, durably, if there are any."""
    root.delete([_metrics_file(step)])
    root.sync()


def _metrics_file(step: int) -> str:
    return f"{_METRICS}{step_name(step)}.json"


_PINS = ".megackpt/pins/"


def read_pins(root: Store) -> frozenset[int]:
    """Return the pinned steps, whether they exist or not."""
    return frozenset(steps_of(name.removeprefix(_PINS) for name in root.names(_PINS)))


def is_pinned(root: Store, step: int) -> bool:
    """Say whether a step is pinned right now."""
    return root.exists(_pin_file(step))


def write_pin(root: Store, step: int) -> None:
    """Pin a step, durably."""
    if not is_pinned(root, step):
        root.write(_pin_file(step), b"megackpt never removes this step\n")
        root.sync()


def remove_pin(root: Store, step: int) -> None:
    """Let a step be removed again; one that is not pinned is fine."""
    root.delete([_pin_file(step)])
    root.sync()


def _pin_file(step: int) -> str:
    return f"{_PINS}{step_name(step)}"


TRACKER = "latest_checkpointed_iteration.txt"


def write_tracker(root: Store, newest: int | None) -> None:
    """Note the newest step, atomically; without one there is no file."""
    if newest is not None:
        root.replace(TRACKER, str(newest).encode())
        return
    root.delete([TRACKER])
    root.sync()
