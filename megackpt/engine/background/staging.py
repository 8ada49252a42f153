"""Copying what is saved into the memory that a writer process reads.

Owns the order of copying and when the writer is told of it; knows nothing of processes. What a rank writes
is one stream of bytes, its rows in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megackpt.engine.background.staging_memory import ByteArray, RowLayout, ring_ranges
from megackpt.formats.strategy import ChunkParts


class StreamReader(Protocol):
    """What is known of the reader of a stream."""

    def room_from(self, position: int) -> int:
        """Return up to where the stream may be written; wait until that is behind position.

        Raises:
            StreamClosedError: nobody reads it any more.
        """

    def tell_staged(self, position: int) -> None:
        """Let the reader know that the stream is there up to a position."""


class StreamClosedError(Exception):
    """The reader has failed, so what is left of the stream is of no use; it tells its error itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """A part of a stream: the rows of one save, laid out from start on."""

    start: int
    layout: RowLayout

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + self.layout.stop


def fill(
    memory: ByteArray, span: StreamRange, rows: Sequence[int], pieces: ChunkParts, ring: StreamReader
) -> None:
    """Copy rows into a ring of memory, `[capacity]`, in waves where they are more than there is room for.

    The reader is told when all is there: until then it would only take processor time from the copy. In
    waves it is told after each quarter of the memory.

    Raises:
        StreamClosedError: see `StreamReader`.
        CheckpointError: what pieces raise.
    """
    if not rows:
        ring.tell_staged(span.stop)
        return
    free = ring.room_from(span.start)
    told = span.start
    of_rows = pieces.in_order(rows)
    for at, of_row in zip((span.layout.start + span.start).tolist(), of_rows, strict=True):
        for piece in of_row:
            data = np.frombuffer(piece, np.uint8)
            while data.size:
                if free <= at:
                    ring.tell_staged(at)
                    told = at
                    free = ring.room_from(at)
                count = min(data.size, free - at)
                _copy(memory, at, data[:count])
                at, data = at + count, data[count:]
                if free < span.stop and at - told >= memory.size // 4:
                    ring.tell_staged(at)
                    told = at
    ring.tell_staged(span.stop)


def _copy(memory: ByteArray, position: int, data: ByteArray) -> None:
    done = 0
    for low, high in ring_ranges(position, position + data.size, capacity=memory.size):
        np.copyto(memory[low:high], data[done : done + high - low])  # without the interpreter lock
        done += high - low
