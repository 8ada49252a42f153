"""Copying what is saved into the staging memory, from which a writer process reads it.

What a rank writes is one stream of bytes: its rows, in their order. The stream passes through the memory as
through a ring buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megackpt.engine.background.staging_memory import ByteArray, RowLayout, ring_ranges
from megackpt.formats.strategy import ChunkParts


class StreamReader(Protocol):
    """The process that reads the stream, as the process that writes it sees it."""

    def room_from(self, position: int) -> int:
        """Return up to which position the stream may be written; wait until that is beyond position.

        Raises:
            StreamClosedError: the reader has failed.
        """

    def report_staged(self, position: int) -> None:
        """Report to the reader that the stream is written up to a position."""


class StreamClosedError(Exception):
    """The reader has failed, so the rest of the stream is of no use; the reader reports its own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRange:
    """The range of a stream that has the rows of one save.

    Attributes:
        start: position of its first byte.
        layout: where the rows lie, from start on.
    """

    start: int
    layout: RowLayout

    @property
    def stop(self) -> int:
        """Position after its last byte."""
        return self.start + self.layout.stop


def copy_rows(
    memory: ByteArray, target: StreamRange, rows: Sequence[int], parts: ChunkParts, reader: StreamReader
) -> None:
    """Copy rows into a ring of memory, `[capacity]`; if they do not fit, wait for the reader to free memory.

    If all rows fit, this is reported at the end: before, the reader would take processor time from the copy.
    If they do not fit, it is reported after each quarter of the memory.

    Raises:
        StreamClosedError: see `StreamReader`.
        CheckpointError: raised by parts.
    """
    if not rows:
        reader.report_staged(target.stop)
        return
    free_until = reader.room_from(target.start)
    reported = target.start
    starts = (target.layout.start + target.start).tolist()
    for position, row_parts in zip(starts, parts.in_order(rows), strict=True):
        for part in row_parts:
            data = np.frombuffer(part, np.uint8)
            while data.size:
                if free_until <= position:
                    # No room: what is staged is all that the reader can free.
                    reader.report_staged(position)
                    reported = position
                    free_until = reader.room_from(position)
                count = min(data.size, free_until - position)
                _copy(memory, position, data[:count])
                position, data = position + count, data[count:]
                if free_until < target.stop and position - reported >= memory.size // 4:
                    reader.report_staged(position)
                    reported = position
    reader.report_staged(target.stop)


def _copy(memory: ByteArray, position: int, data: ByteArray) -> None:
    done = 0
    for low, high in ring_ranges(position, position + data.size, capacity=memory.size):
        np.copyto(memory[low:high], data[done : done + high - low])  # without the interpreter lock
        done += high - low
