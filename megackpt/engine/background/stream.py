"""The stream of bytes that a rank stages, as its writer process reads it.

Owns how far it is there, waiting for more, and telling the rank which memory may be used again. What is in
it, and how it gets there, is in `staging`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from megackpt.comm.messages import decode_error
from megackpt.engine.background.heartbeat import BEAT_S, Heartbeat
from megackpt.engine.background.messages import ConsumedMessage, FromWriter, Job
from megackpt.engine.background.staging_memory import ByteArray, RowLayout, ring_ranges
from megackpt.formats.strategy import ChunkParts

_VIEW_BYTES = 8 << 20  # memory of a stream is given back in such steps


class StagedStream:
    """How far the stream of this rank is there, and how far it was used. Safe for several threads."""

    def __init__(self, tell: Callable[[FromWriter], None], pulse: Heartbeat) -> None:
        self._tell = tell
        self._pulse = pulse
        self._news = threading.Condition()
        self._staged = 0
        self._consumed = 0
        self._cancelled: dict[int, bytes] = {}

    def stage(self, position: int) -> None:
        """Note that the stream is there up to a position."""
        with self._news:
            self._staged = max(self._staged, position)
            self._news.notify_all()

    def cancel(self, job: int, error: bytes) -> None:
        """Note that the part of a job will never be there."""
        with self._news:
            self._cancelled[job] = error
            self._news.notify_all()

    def is_cancelled(self, job: int) -> bool:
        """Say whether the part of a job will never be there."""
        return job in self._cancelled

    def wait(self, position: int, *, job: int) -> None:
        """Return when the stream is there up to a position.

        Raises:
            CheckpointError: why it will never be.
        """
        self._pulse.beat()
        with self._news:
            while not self._news.wait_for(
                lambda: self._staged >= position or job in self._cancelled, timeout=BEAT_S
            ):
                self._pulse.beat()  # the training takes its time
            if job in self._cancelled:
                raise decode_error(self._cancelled[job])

    def consume(self, position: int, *, step: int = 0) -> None:
        """Let the memory before a position be used again; said if it is as much as step."""
        with self._news:
            if position - self._consumed < max(step, 1):
                return
            self._consumed = position
        self._tell(ConsumedMessage(position))


class StreamRowParts(ChunkParts):
    """The bytes of rows that come through a stream."""

    def __init__(
        self, stream: StagedStream, memory: ByteArray, rows: Sequence[int], layout: RowLayout, job: Job
    ) -> None:
        self._stream, self._memory, self._job = stream, memory, job
        starts = (layout.start + job.start).tolist()
        self._span = dict(zip(rows, zip(starts, layout.nbytes.tolist(), strict=True), strict=True))

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Return the bytes of one row."""
        start, nbytes = self._span[int(row)]
        capacity, in_order = self._memory.size, self._job.in_order
        # A quarter: of what is consumed up to a sixteenth is not said yet, so not all of it is free.
        step = min(_VIEW_BYTES, capacity // 4) if in_order else max(nbytes, 1)
        for low in range(start, start + nbytes, step):
            high = min(low + step, start + nbytes)
            for first, last in ring_ranges(low, high, capacity=capacity):
                self._stream.wait(low + last - first, job=self._job.number)
                yield self._memory.data[first:last]
                low += last - first
                if in_order and not self._job.keeps:
                    self._stream.consume(low, step=capacity // 16)
