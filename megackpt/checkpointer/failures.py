"""What becomes of a save that failed: an error, or a warning and a count.

Owns which errors training may outlive. What a failed save leaves in the store is up to `engine.write` and
`housekeeping`.
"""

from __future__ import annotations

import logging
import weakref
from types import TracebackType
from typing import Literal, get_args

from megackpt.errors import CheckpointError, DeclarationError, IntegrityError, StorageError, WriterFailedError

log = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]

OUTLIVED = (StorageError, IntegrityError, WriterFailedError)
"""What the store did, and processes that are started again.

Not among them: mistakes of the caller, which the next save would meet again, an error that is none of ours,
from a strategy say, in whichever process it was raised; and ranks that are lost, whose connections do not
recover.
"""


class Failures:
    """A context manager around saving, to be entered again and again: counts, and raises or warns.

    rank is that of this process; rank 0, and the rank that failed, say why.

    Attributes:
        count: how many saves have failed.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise DeclarationError(f"on_error={on_error!r} is not known. Give 'raise' or 'warn'.")
        self._on_error = on_error
        self._last: weakref.ref[CheckpointError] | None = None  # not the error: its frames hold the state
        self.count = 0

    def around(self, what: str, *, rank: int) -> Around:
        """Return a block in which a save may fail; what says which."""
        return Around(self, what, rank)

    def take(self, what: str, error: CheckpointError, *, rank: int) -> bool:
        """Count an error, once where it passes through several blocks; say whether it is dealt with."""
        if self._last is not None and self._last() is error:
            return False
        self._last = weakref.ref(error)
        self.count += 1
        if self._on_error == "raise":
            return False
        if rank in (0, error.rank):
            cause = error.rank if error.rank is not None else rank
            log.warning(
                "%s failed (rank %s), and training goes on without it; %s saves have failed so far. %s",
                what,
                cause,
                self.count,
                error,
                exc_info=error if rank == cause else None,
            )
        return True


class Around:
    """A block in which a save may fail.

    Attributes:
        has_failed: whether it has, and training goes on.
    """

    def __init__(self, failures: Failures, what: str, rank: int) -> None:
        self._failures, self._what, self._rank = failures, what, rank
        self.has_failed = False

    def __enter__(self) -> Around:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        if not isinstance(error, OUTLIVED):
            return False
        self.has_failed = self._failures.take(self._what, error, rank=self._rank)
        return self.has_failed
