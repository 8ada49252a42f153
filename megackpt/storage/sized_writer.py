"""What writers of all stores have in common: a file is as long as was said, or there is none.

Owns how many bytes a writer takes, what leaving its block means, and that it ends once. How bytes are kept,
and how they are got rid of, is up to the writer of each store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from megackpt.storage.error_translation import closed_early, too_many_bytes, writer_is_closed


class SizedWriter(ABC):
    """A `StreamWriter` but for `write`, which counts in `_written` what it took after `_check_room`.

    Attributes:
        _open: whether it has not ended; `_complete` and `_abandon` make it False.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._written = 0
        self._open = True

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""

    def close(self) -> None:
        """Make the content durable and visible. See StreamWriter."""
        if not self._open:
            return
        if self._written != self._nbytes:
            self._abandon()
            raise closed_early(self._path, written=self._written, expected=self._nbytes)
        self._complete()

    def __enter__(self) -> SizedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is None:
            self.close()
        elif self._open:
            self._abandon()

    def _check_room(self, nbytes: int) -> None:
        """Refuse to write nbytes more into a file that has ended, or that would be longer than was said."""
        if not self._open:
            raise writer_is_closed(self._path)
        if self._written + nbytes > self._nbytes:
            raise too_many_bytes(self._path, nbytes, written=self._written, expected=self._nbytes)

    @abstractmethod
    def _complete(self) -> None:
        """End with all bytes written; leave nothing behind where that fails."""

    @abstractmethod
    def _abandon(self) -> None:
        """End without a file."""
