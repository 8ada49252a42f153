"""Short writes joined into longer ones.

A write of a kilobyte takes a store about as long as one of a few hundred.
"""

from __future__ import annotations

from megackpt.storage import StreamWriter

_SHORT_BYTES = 32 << 10
_BUFFER_BYTES = 1 << 20


class BufferedWriter:
    """Passes bytes to a writer, in order; short writes are collected in a buffer first."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._buffer = bytearray()

    def write(self, data: memoryview) -> None:
        """Take the next bytes; their memory may be used again when this returns."""
        if len(data) > _SHORT_BYTES:
            self.flush()
            self._writer.write(data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass on what is in the buffer."""
        if self._buffer:
            self._writer.write(memoryview(self._buffer))
            self._buffer = bytearray()
