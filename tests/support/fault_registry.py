"""What a test of a fault expects: the class of the error, and parts of its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from megackpt import CheckpointError, CoverageError, MismatchError
from tests.support.declared_worlds import World


@dataclass(frozen=True)
class ExpectedError:
    """What an error has to be and say."""

    error: type[CheckpointError]
    message: tuple[str, ...]


Fault: TypeAlias = Callable[[World], ExpectedError]
"""Spoils a valid world, and returns the error that a save has to raise."""


class FaultRegistry(dict[str, Fault]):
    """Faults by the names of their functions."""

    def add(self, fault: Fault) -> Fault:
        """Register a fault; a decorator."""
        self[fault.__name__] = fault
        return fault


def not_covered(*message: str) -> ExpectedError:
    return ExpectedError(CoverageError, message)


def differs(*message: str) -> ExpectedError:
    return ExpectedError(MismatchError, message)
