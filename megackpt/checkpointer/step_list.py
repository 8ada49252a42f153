"""Which steps there are below a root, and which of those count.

Owns the list. How directories are called, and how it is found out what is in them, is up to `engine.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megackpt.engine.checkpoint.steps import StepDirectories, step_of


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
    torn = [name for name in names if name not in committed and places.is_leftover(name)]
    return StepList(steps_of(committed), steps_of(torn))
