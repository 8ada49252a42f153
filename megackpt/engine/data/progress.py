"""How far a long piece of work has come: the protocol by which whoever draws it is told."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told how far this rank has come. Several threads may tell it at once."""

    def begin(self, doing: str, nbytes: int) -> None:
        """A part of the work begins, in which this rank moves so many bytes."""

    def advance(self, nbytes: int) -> None:
        """So many bytes more have been moved."""


class NoProgress:
    """A `Progress` that nobody looks at."""

    def begin(self, doing: str, nbytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""
