"""The messages that wait to be sent to the writer process, oldest first.

They are sent by a thread of their own: a full pipe blocks its sender, and training must not wait for that.
"""

from __future__ import annotations

import contextlib
import queue
from multiprocessing.connection import Connection

from megackpt.engine.background.messages import ToWriter
from megackpt.engine.background.prepared_save import SubmittedJob


class Outbox:
    """Messages to one writer process. Any thread may put one; one thread calls `send_all`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[ToWriter | SubmittedJob | None] = queue.SimpleQueue()

    def put(self, message: ToWriter | SubmittedJob) -> None:
        """Send a message later. A submitted job is sent once, however often it is put here."""
        self._waiting.put(message)

    def close(self) -> None:
        """Let `send_all` return after the messages that are waiting."""
        self._waiting.put(None)

    def send_all(self, connection: Connection) -> None:
        """Send messages until `close` is called. What a process that has ended does not take is dropped.

        Raises:
            Exception: a message cannot be pickled.
        """
        while (message := self._waiting.get()) is not None:
            if isinstance(message, SubmittedJob):
                # The process does a job as often as it receives it.
                if message.is_sent:
                    continue
                message.is_sent = True
                message = message.job
            with contextlib.suppress(OSError):  # it has ended, which the receiving thread notices
                connection.send(message)
