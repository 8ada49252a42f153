"""The stream of bytes that a rank stages, as its writer process reads it.

The stream passes through the staging memory. The writer process waits until bytes are staged, and reports
which memory is free again. `staging_memory` has the side of the rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from megackpt.comm.group import decode_error
from megackpt.engine.background.heartbeat import BEAT_S, Heartbeat
from megackpt.engine.background.messages import ConsumedMessage, FromWriter, Job
from megackpt.engine.background.staging_memory import ByteArray, RowLayout, ring_ranges
from megackpt.formats.strategy import ChunkParts

_PART_BYTES = 8 << 20  # memory of a stream is freed in such steps


class StagedStream:
    """Tracks how far the stream of this rank is staged, and how far it is read. Thread-safe."""

    def __init__(self, send: Callable[[FromWriter], None], heartbeat: Heartbeat) -> None:
        self._send = send
        self._heartbeat = heartbeat
        self._lock = threading.RLock()
        # Blocks enter the lock: Condition.__exit__ is Python code, and Ctrl-C in it could leave it locked.
        self._changed = threading.Condition(self._lock)
        self._staged = 0
        self._consumed = 0
        self._cancelled: dict[int, bytes] = {}

    def stage(self, position: int) -> None:
        """Note that the stream is staged up to a position."""
        with self._lock:
            self._staged = max(self._staged, position)
            self._changed.notify_all()

    def cancel(self, job: int, error: bytes) -> None:
        """Note that the bytes of a job will never be staged."""
        with self._lock:
            self._cancelled[job] = error
            self._changed.notify_all()

    def is_cancelled(self, job: int) -> bool:
        """Return whether the bytes of a job will never be staged."""
        return job in self._cancelled

    def wait(self, position: int, *, job: int) -> None:
        """Return when the stream is staged up to a position.

        Raises:
            CheckpointError: the bytes of the job will never be staged; the error of the rank.
        """
        self._heartbeat.beat()
        with self._lock:
            while not self._changed.wait_for(
                lambda: self._staged >= position or job in self._cancelled, timeout=BEAT_S
            ):
                self._heartbeat.beat()  # the training is slow, not this process
            # Even if the position is staged: the bytes of a cancelled job are not those of its state.
            if job in self._cancelled:
                raise decode_error(self._cancelled[job])

    def consume(self, position: int, *, step: int = 0) -> None:
        """Free the memory before a position. Report it to the rank if it is at least step bytes."""
        with self._lock:
            if position - self._consumed < max(step, 1):
                return
            self._consumed = position
        # Without the lock: a full pipe blocks, and the thread that receives needs the lock to note staged
        # bytes.
        self._send(ConsumedMessage(position))


class StreamRowParts(ChunkParts):
    """The bytes of rows that come through a stream."""

    def __init__(
        self, stream: StagedStream, memory: ByteArray, rows: Sequence[int], layout: RowLayout, job: Job
    ) -> None:
        self._stream, self._memory, self._job = stream, memory, job
        starts = (layout.start + job.start).tolist()
        self._ranges = dict(zip(rows, zip(starts, layout.nbytes.tolist(), strict=True), strict=True))

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Return the bytes of one row."""
        start, nbytes = self._ranges[int(row)]
        capacity, in_order = self._memory.size, self._job.in_order
        # A part is at most a quarter of the memory: up to a sixteenth of it is free and not reported yet.
        step = min(_PART_BYTES, capacity // 4) if in_order else max(nbytes, 1)
        for low in range(start, start + nbytes, step):
            high = min(low + step, start + nbytes)
            for first, last in ring_ranges(low, high, capacity=capacity):
                self._stream.wait(low + last - first, job=self._job.number)
                yield self._memory.data[first:last]
                # The strategy has taken this part when it asks for the next one. Until then its memory must
                # not be free.
                low += last - first
                if in_order and not self._job.keeps:
                    self._stream.consume(low, step=capacity // 16)
