"""A rank and its writer process: an unexpected error of a thread between them leaves no job waiting."""

from __future__ import annotations

import pickle
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from megackpt.engine.background import process as writer_process
from megackpt.engine.background.child_process import ChildProcess
from megackpt.engine.background.messages import CheckpointLocation, CommittedMessage, EndedMessage, Job
from megackpt.engine.background.prepared_save import SubmittedJob
from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.errors import WriterFailedError
from megackpt.options import AsyncOptions
from tests.support.writers import wait_for


class FakeProcess:
    """A process that does nothing until it is killed; its end of the pipe is closed with it."""

    pid = 4711
    returncode: int | None = None

    def __init__(self, end: Connection) -> None:
        self.end = end

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -9
            self.end.close()

    def wait(self, timeout: float) -> None:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("writer", timeout)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[WriterProcess]:
    def start(*_: object) -> ChildProcess:
        ours, theirs = socket.socketpair()
        process: Any = FakeProcess(Connection(theirs.detach()))
        return ChildProcess(process, Connection(ours.detach()))

    monkeypatch.setattr(writer_process, "start_writer", start)
    writer = WriterProcess(AsyncOptions(), memory=StagingMemory(), kind=(0, None, None))
    yield writer
    writer.close()


def submit(writer: WriterProcess, *, common: Any = None) -> SubmittedJob:
    number, start = writer.next_job()
    job = Job(
        number=number,
        label="step 7",
        attempt="a",
        location=CheckpointLocation(root="r", name="n"),
        strategy=b"",
        hooks=(),
        plan=0,
        sizes=np.zeros(0, np.int64),
        report=b"",
        common=common,
        start=start,
        in_order=True,
        keeps=False,
        verify=None,
    )
    return writer.submit(job, 0, lambda damages: None, lambda error: False)


def its_end(writer: WriterProcess) -> Connection:
    """Return the end of the pipe that the process has."""
    process: Any = writer._process._process
    end: Connection = process.end
    return end


UNUSABLE: dict[str, Callable[[Connection], None]] = {
    "UnpicklingError": lambda end: end.send_bytes(b"no pickle"),
    "StopIteration": lambda end: end.send(EndedMessage(99, None)),  # there is no job of this number
    "JSONDecodeError": lambda end: end.send(EndedMessage(0, b"no error")),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_message_that_cannot_be_handled_fails_the_jobs_and_ends_the_process(
    writer: WriterProcess, kind: str
) -> None:
    job = submit(writer)
    UNUSABLE[kind](its_end(writer))
    wait_for(lambda: job.is_over)
    text = (
        rf"writer process of rank 0 \(process 4711\) sent a message that could not be handled \({kind}.*\) "
        rf"and was killed while saving step 7\. It is started again for the next save\."
    )
    assert isinstance(job.error, WriterFailedError)
    assert re.search(text, str(job.error))
    assert writer.is_lost
    assert its_end(writer).closed


def test_a_commit_fails_the_job_if_no_thread_can_be_started_for_its_follow_up(
    writer: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    job = submit(writer)
    monkeypatch.setattr(threading.Thread, "start", start)
    its_end(writer).send(CommittedMessage(job.job.number, None))
    wait_for(lambda: job.is_over)
    assert "could not be handled (RuntimeError: can't start new thread)" in str(job.error)


def test_a_message_that_cannot_be_sent_fails_the_jobs_and_ends_the_process(writer: WriterProcess) -> None:
    def local() -> None:
        """Cannot be pickled, as it is a function of a function."""

    with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
        pickle.dumps(local)
    job = submit(writer, common=local)
    writer.report_staged(0)
    wait_for(lambda: job.is_over)
    reason = f"{raised.type.__name__}: {raised.value}"
    assert f"could not be sent a message ({reason}) and was killed" in str(job.error)
    assert writer.is_lost
