"""Pins: steps that nothing removes.

Owns the file that pins a step: `.megackpt/pins/iter_0000100` below the root. It is there or not, whatever is
in it, so a crash cannot leave half of a pin; it lies beside the steps, so that formats need not know of it,
and one listing finds all.
"""

from __future__ import annotations

from megackpt.checkpointer.step_list import steps_of
from megackpt.engine.checkpoint.steps import step_name
from megackpt.storage import Store

_FOLDER = ".megackpt/pins/"


def read_pins(root: Store) -> frozenset[int]:
    """Return the pinned steps, whether they exist or not."""
    return frozenset(steps_of(name.removeprefix(_FOLDER) for name in root.names(_FOLDER)))


def is_pinned(root: Store, step: int) -> bool:
    """Say whether a step is pinned right now."""
    return root.exists(_file_of(step))


def write_pin(root: Store, step: int) -> None:
    """Pin a step, durably."""
    if not is_pinned(root, step):
        root.write(_file_of(step), b"megackpt never removes this step\n")
        root.sync()


def remove_pin(root: Store, step: int) -> None:
    """Let a step be removed again; one that is not pinned is fine."""
    root.delete([_file_of(step)])
    root.sync()


def _file_of(step: int) -> str:
    return f"{_FOLDER}{step_name(step)}"
