"""The protocol by which long work reports its progress to whoever displays it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of this rank. Several threads may report at once."""

    def begin(self, doing: str, nbytes: int) -> None:
        """Report that a phase of the work begins. This rank moves nbytes in it."""

    def advance(self, nbytes: int) -> None:
        """Report that nbytes more have been moved."""


class NoProgress:
    """A `Progress` that displays nothing."""

    def begin(self, doing: str, nbytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""
