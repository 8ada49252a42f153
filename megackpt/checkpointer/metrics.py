"""Metrics of steps, such as a validation loss, for a policy that keeps the best.

Owns the file that holds them: `.megackpt/metrics/iter_0000100.json` below the root. It is written before the
step is committed, so that every committed step that was given metrics has them, also after a restart; beside
the steps, since formats that others define have no room for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from megackpt.checkpointer.step_list import steps_of
from megackpt.engine.checkpoint.steps import step_name
from megackpt.errors import DeclarationError, FormatError
from megackpt.storage import Store

_FOLDER = ".megackpt/metrics/"
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
    root.replace(_file_of(step), json.dumps(plain, sort_keys=True).encode())


def read_metrics(root: Store, step: int) -> dict[str, float]:
    """Return the metrics of a step; none if there are none, or if they are damaged."""
    if not root.exists(_file_of(step)):
        return {}
    try:
        said: Any = json.loads(root.read(_file_of(step), max_bytes=_MAX_BYTES))
        return {str(name): float(value) for name, value in said.items()}
    except (FormatError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def steps_with_metrics(root: Store) -> tuple[int, ...]:
    """Return the steps that have metrics, whether they exist or not, ascending."""
    files = (name.removeprefix(_FOLDER) for name in root.names(_FOLDER))
    return steps_of(name.removesuffix(".json") for name in files if name.endswith(".json"))


def forget_metrics(root: Store, step: int) -> None:
    """Remove the metrics of a step, durably, if there are any."""
    root.delete([_file_of(step)])
    root.sync()


def _file_of(step: int) -> str:
    return f"{_FOLDER}{step_name(step)}.json"
