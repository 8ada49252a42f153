"""A job that was submitted to a writer process, as its rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megackpt.engine.background.messages import Job
from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage

CommitHandler = Callable[[Sequence[Damage] | None], None]
"""Does what follows a commit. It is given the damage that was found in the checkpoint; None if the
checkpoint was not verified."""

FailureHandler = Callable[[Exception], bool]
"""Does what follows a failure. It returns whether the error is handled, so that it is not raised."""


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job that was submitted to the writer process, and its state.

    Attributes:
        job: the job that is sent to the process.
        stop: one past the last position of the stream that belongs to it.
        on_commit: called here when the job is committed.
        on_failure: called here when the job has failed.
        is_sent: whether the job was sent to the process.
        is_staged: whether all that it writes was staged, or never will be.
        is_followed_up: whether `on_commit` is running.
        is_over: whether the job has ended.
        error: why it failed; None if it has not, or `on_failure` has handled the error.
    """

    job: Job
    stop: int
    on_commit: CommitHandler
    on_failure: FailureHandler
    is_sent: bool = False
    is_staged: bool = False
    is_followed_up: bool = False
    is_over: bool = False
    error: CheckpointError | None = None
