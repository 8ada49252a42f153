"""What is compared: one way to save and load a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megackpt.cli.benchmark.state import GridLayout, RankState


class Contender(Protocol):
    """One way to save and load a state. Saving and loading are collective, and durable when they return.

    Attributes:
        thread_counts: numbers of writing threads that it can be given; none where it has none to set.
        threads: the one that it uses; settable where there are several.
        can_save_async: whether `save_async` is there.
    """

    thread_counts: tuple[int, ...]
    threads: int
    can_save_async: bool

    @property
    def name(self) -> str:
        """What it is called in results."""

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """Say why it cannot save at one layout and load at another; None if it can."""

    def declare(self, state: RankState) -> Any:
        """Return a rank's state as the library wants it; anew for each save and load, and not timed."""

    def save(self, declared: Any, directory: Path) -> None:
        """Save what was declared into a new, empty directory."""

    def load(self, declared: Any, directory: Path) -> None:
        """Fill the tensors that were declared."""

    def save_async(self, declared: Any, directory: Path) -> Callable[[], Path]:
        """Begin to save, and return once the state may change again.

        What is returned waits for the end, and returns where the checkpoint is.
        """
