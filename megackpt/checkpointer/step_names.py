"""Which directories below a root are steps, and which of those count.

Owns the names of step directories. What lies in them, and how it is found out, is up to `engine.steps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megackpt.engine.steps import StepPlaces

_STEP_DIRECTORY = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class StepList:
    """The step directories under a root, sorted.

    Attributes:
        committed: steps that can be loaded.
        torn: steps whose save did not finish, or whose removal did not; directories that hold anything but
            what a save of ours writes are not among them.
    """

    committed: tuple[int, ...]
    torn: tuple[int, ...]


def name_of(step: int) -> str:
    """Return the name of a step's directory.

    >>> name_of(100)
    'iter_0000100'
    """
    return f"iter_{step:07d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory; None for a name that `name_of` does not make."""
    match = _STEP_DIRECTORY.fullmatch(name)
    step = int(match.group(1)) if match else None
    return step if step is not None and name == name_of(step) else None


def steps_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the steps of those names that are names of steps, ascending."""
    return tuple(sorted(step for name in names if (step := step_of(name)) is not None))


def scan(places: StepPlaces) -> StepList:
    """Look at what is below a root. Local.

    Raises:
        OSError: it cannot be listed.
    """
    names = [name for name in places.names() if step_of(name) is not None]
    committed = set(places.committed(names))
    torn = [name for name in names if name not in committed and places.is_leftover(name)]
    return StepList(steps_of(committed), steps_of(torn))
