"""Staging waits until the writer process has read enough, or has ended."""

from __future__ import annotations

import threading

import pytest

from megackpt.engine.background.messages import ConsumedMessage
from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging_memory import StreamClosedError
from tests.core.comm.test_writers import its_end, submit
from tests.core.comm.test_writers import writer as writer
from tests.support.writers import wait_for


def test_staging_that_waits_for_room_ends_when_the_process_does(writer: WriterProcess) -> None:
    ended = threading.Event()

    def stage() -> None:
        with pytest.raises(StreamClosedError):
            writer.room_from(0)
        ended.set()

    submit(writer)
    threading.Thread(target=stage, daemon=True).start()
    wait_for(lambda: bool(writer._changed._waiters))  # type: ignore[attr-defined]  # it waits
    writer.kill()
    assert ended.wait(20)


def test_staging_waits_until_the_process_has_read_what_is_in_the_way(writer: WriterProcess) -> None:
    room: list[int] = []
    submit(writer)
    staging = threading.Thread(target=lambda: room.append(writer.room_from(5)), daemon=True)
    staging.start()
    wait_for(lambda: bool(writer._changed._waiters))  # type: ignore[attr-defined]  # it waits
    its_end(writer).send(ConsumedMessage(8))
    staging.join(20)
    assert room == [8]
