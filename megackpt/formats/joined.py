"""Short pieces on their way to a file, put together.

Owns when they are handed on. A tensor of a kilobyte costs a writer about as much as one of some hundred.
"""

from __future__ import annotations

from megackpt.storage import StreamWriter

_SHORT_BYTES = 32 << 10
_MOST_BYTES = 1 << 20


class Joined:
    """Hands pieces on to a writer, in order; short ones together with their neighbours."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._waiting = bytearray()

    def write(self, piece: memoryview) -> None:
        """Take the next bytes; they may be reused once this returns."""
        if len(piece) > _SHORT_BYTES:
            self.flush()
            self._writer.write(piece)
            return
        self._waiting += piece
        if len(self._waiting) >= _MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand on what waits."""
        if self._waiting:
            self._writer.write(memoryview(self._waiting))
            self._waiting = bytearray()
