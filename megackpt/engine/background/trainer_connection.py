"""The connection of a writer process to the training process that has started it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megackpt.comm.group import decode_error
from megackpt.engine.background.heartbeat import Heartbeat
from megackpt.engine.background.messages import CommittedMessage, FollowUpDoneMessage, FromWriter, ToWriter
from megackpt.formats.damage import Damage


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
