"""A writer process's end of what it shares with the training process: messages, heartbeats, staged bytes.

The bytes are a stream that passes through the staging memory. The writer process waits until bytes are
staged, and reports which memory is free again. `staging_memory` has the side of the rank.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from megackpt.comm.group import decode_error
from megackpt.engine.background.messages import (
    BEAT_S,
    AliveMessage,
    CommittedMessage,
    ConsumedMessage,
    FollowUpDoneMessage,
    FromWriter,
    Job,
    ToWriter,
)
from megackpt.engine.background.staging_memory import RowLayout, ring_ranges
from megackpt.engine.data.device_copies import ByteArray
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import ChunkParts

_PART_BYTES = 8 << 20  # memory of a stream is freed in such steps


class Heartbeat:
    """Tells the rank that this process works or waits for others, at most once in BEAT_S.

    Any thread may use it.
    """

    def __init__(self, send: Callable[[FromWriter], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note progress: bytes were moved, or this process waits for something that has its own deadline."""
        now = time.monotonic()
        with self._lock:
            if now - self._last < BEAT_S:
                return
            self._last = now
        self._send(AliveMessage())  # without the lock: a full pipe blocks


class TrainerConnection:
    """Messages to and from the training process. Any thread may send; one thread receives.

    Attributes:
        heartbeat: reports to the training process that this one works.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._follow_ups: queue.SimpleQueue[FollowUpDoneMessage] = queue.SimpleQueue()
        self.heartbeat = Heartbeat(self.send)

    def send(self, message: FromWriter) -> None:
        """Send a message."""
        with self._sending:
            self._connection.send(message)

    def receive(self) -> ToWriter:
        """Return the next message.

        Raises:
            EOFError, ConnectionError: the training has closed the connection.
        """
        message: ToWriter = self._connection.recv()
        return message

    def note_follow_up(self, message: FollowUpDoneMessage) -> None:
        """Hand over the message that `follow_up` waits for."""
        self._follow_ups.put(message)

    def follow_up(self, job: int, damages: Sequence[Damage] | None) -> None:
        """Request the work after the commit of a job from the training process, and wait until it is done.

        Raises:
            CheckpointError: the error of the training process.
        """
        self.send(CommittedMessage(job, None if damages is None else tuple(damages)))
        # Jobs are done one after the other, so the next message is about this one. There is no heartbeat
        # meanwhile: the training process knows that it is at work itself.
        message = self._follow_ups.get()
        if message.error is not None:
            raise decode_error(message.error)


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
        self.object_sizes = job.object_sizes
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
