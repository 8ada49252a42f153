"""A job that was given to a writer process, as its rank sees it, and what is done when it ends.

Owns what is known of it; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megackpt.engine.background.messages import Job
from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage

CommitHandler = Callable[[Sequence[Damage] | None], None]
"""Does what follows a commit, given what is wrong with what was committed; None if nobody has looked."""

FailureHandler = Callable[[Exception], bool]
"""Does what follows a failure; returns whether that is all there is to it, so that nobody is to raise it."""


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job that was given to the process, and what became of it.

    Attributes:
        job: what it was told.
        stop: one past the last position of the stream that belongs to it.
        follow: what is done here when it is committed.
        failed: what is done here when it has failed; what that deals with is no error.
        is_told: whether the process was sent it.
        is_staged: whether all that it writes was staged, or never will be.
        is_followed: whether `follow` is under way.
        is_over: whether it has ended.
        error: why it failed; None if it did not.
    """

    job: Job
    stop: int
    follow: CommitHandler
    failed: FailureHandler
    is_told: bool = False
    is_staged: bool = False
    is_followed: bool = False
    is_over: bool = False
    error: CheckpointError | None = None
