"""Processes and threads that write: their groups, their messages, and their end."""

from __future__ import annotations

import gc
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megackpt.comm import store_group, writer_group
from megackpt.comm.child_processes import child_environment
from megackpt.comm.group import decode_error, encode_error
from megackpt.comm.store_host import StoreAddress, host_towards
from megackpt.comm.transport import TRANSPORT_VARIABLE, open_transport
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background import process as writer_process
from megackpt.engine.background import saver as saver_module
from megackpt.engine.background import session
from megackpt.engine.background.child_process import ChildProcess
from megackpt.engine.background.messages import (
    CancelledMessage,
    CheckpointLocation,
    CommittedMessage,
    ConsumedMessage,
    EndedMessage,
    Job,
    StagedMessage,
)
from megackpt.engine.background.prepared_save import FailureHandler, SubmittedJob
from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.background.staging_memory import StagingMemory, StreamClosedError
from megackpt.engine.data.workers import run_jobs, useful_threads
from megackpt.errors import DeclarationError, WriterFailedError
from megackpt.options import AsyncOptions
from tests.support.groups import on_clients, shared
from tests.support.writers import wait_for


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_job_is_done_once(threads: int) -> None:
    done: list[int] = []
    run_jobs([partial(done.append, i) for i in range(1000)], threads=threads, name="test")
    assert sorted(done) == list(range(1000))


def test_the_calling_thread_takes_part_and_no_more_are_made_than_there_are_jobs() -> None:
    names: set[str] = set()
    run_jobs([lambda: names.add(threading.current_thread().name)], threads=8, name="test")
    assert names == {threading.current_thread().name}
    run_jobs([], threads=8, name="test")
    collective = threading.Barrier(3)  # only three at the same time get past it
    run_jobs([partial(collective.wait, 20)] * 3, threads=3, name="test")


def test_no_job_is_under_way_after_threads_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started, never = threading.Thread.start, list[threading.Thread](), threading.Event()

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_jobs([partial(never.wait, 0.2)] * 20, threads=3, name="test")
    assert not started[0].is_alive()


def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    done: list[int] = []
    collective = threading.Barrier(2)

    def fail(number: int) -> None:
        collective.wait(20)  # both have begun before either fails
        raise ValueError(str(number))

    with pytest.raises(ValueError, match=r"^0$"):
        run_jobs(
            [partial(fail, 0), partial(fail, 1), *[partial(done.append, i) for i in range(50)]],
            threads=2,
            name="test",
        )
    assert done == []


@pytest.mark.parametrize(("ranks", "useful"), [("1", 4), ("3", 2), ("99", 1), ("", 4), ("many", 4)])
def test_jobs_that_wait_for_nothing_share_the_processors_with_other_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: str, useful: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert useful_threads(4, waits=False) == useful
    assert useful_threads(4, waits=True) == 4


MIB = 1 << 20


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_group, "LOOK_EVERY_S", 0.2)


def on_ranks(
    server: Any, ranks: int, act: Callable[[WriterGroup], Any], *, timeout_s: float = 20
) -> list[Any]:
    """Run on every rank, each with a client of its own; return results or errors."""
    address = StoreAddress("localhost", server.port)

    def run_rank(client: Any, rank: int) -> Any:
        group = WriterGroup(client, address=address, prefix="job", rank=rank, size=ranks, timeout_s=timeout_s)
        try:
            return act(group)
        finally:
            group.leave()

    return on_clients(server, ranks, run_rank)


def text(rank: int, other: int, nbytes: int) -> memoryview:
    return memoryview(bytearray([1 + 16 * rank + other]) * nbytes)


@pytest.mark.parametrize("nbytes", [1, 5 * MIB])
def test_messages_between_all_ranks_arrive_in_order_and_nothing_stays(server: Any, nbytes: int) -> None:
    ranks = 3

    def meet(group: WriterGroup) -> None:
        others = [r for r in range(ranks) if r != group.rank]
        for _ in range(2):
            sends = [(r, text(group.rank, r, n)) for r in others for n in (nbytes, 0, 7)]
            receives = [(r, memoryview(bytearray(n))) for r in others for n in (nbytes, 0, 7)]
            group.exchange(sends, receives)
            for rank, data in receives:
                assert data == text(rank, group.rank, data.nbytes)
        group.exchange([], [])
        shared(group, b"", doing="ending")

    before = server.num_keys()
    assert on_ranks(server, ranks, meet) == [None] * ranks
    assert server.num_keys() == before


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_what_one_has_all_have_whichever_it_is(server: Any, ranks: int) -> None:
    def meet(group: WriterGroup) -> None:
        for root in range(ranks):
            data = text(root, 0, 1000) if group.rank == root else memoryview(bytearray(1000))
            group.broadcast(data, root=root)
            assert data == text(root, 0, 1000)

    assert on_ranks(server, ranks, meet) == [None] * ranks


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="gloo of torch 2.6 ends the process to which a stranger connects",
)
def test_a_stranger_who_connects_is_not_taken_for_a_rank(server: Any) -> None:
    def connect_as_strangers(before: set[int]) -> list[socket.socket]:
        strangers = []
        for port in listening_ports() - before:
            for greeting in (b"", b"abc", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
                strangers.append(socket.create_connection(("localhost", port)))
                strangers[-1].sendall(greeting)
        return strangers

    before = listening_ports()

    def act(group: WriterGroup) -> bytes:
        group.exchange([], [])  # begins to listen
        shared(group, b"", doing="listening")
        strangers = connect_as_strangers(before) if group.rank == 0 else []
        shared(group, b"", doing="beginning")
        data = memoryview(bytearray(b"bytes of rank 1" if group.rank else 15))
        group.exchange([(0, data)] if group.rank else [], [(1, data)] if group.rank == 0 else [])
        strangers += connect_as_strangers(before) if group.rank == 0 else []
        data2 = memoryview(bytearray(b"bytes of rank 1" if group.rank else 15))
        group.exchange([(0, data2)] if group.rank else [], [(1, data2)] if group.rank == 0 else [])
        for stranger in strangers:
            stranger.close()
        return bytes(data) + bytes(data2)

    assert on_ranks(server, 2, act) == [b"bytes of rank 1" * 2] * 2


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    ports = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
    return ports


def receive_from_next(group: WriterGroup) -> None:
    """Each rank but the last waits for the next one."""
    shared(group, b"", doing="beginning")
    group.exchange([], [(group.rank + 1, memoryview(bytearray(2))) for _ in range(2)])


def test_a_rank_that_is_late_is_named_also_by_those_who_wait_for_others(server: Any) -> None:
    is_over = threading.Event()

    def meet(group: WriterGroup) -> None:
        if group.rank == 3:
            shared(group, b"", doing="beginning")
            is_over.wait(20)
            return
        try:
            receive_from_next(group)
        finally:
            is_over.set()

    *errors, last = on_ranks(server, 4, meet, timeout_s=2)
    assert last is None
    assert {str(error) for error in errors} == {str(errors[0])}
    for error in errors:
        assert isinstance(error, WriterFailedError)
        assert error.rank == 3
        assert "No answer from the writer process of rank(s) 3 within 2 s" in str(error)


@pytest.mark.parametrize("reports_why", [False, True])
def test_a_rank_that_is_gone_is_named_by_all_at_once(server: Any, reports_why: bool) -> None:
    def meet(group: WriterGroup) -> None:
        if group.rank < 2:
            receive_from_next(group)
            return
        shared(group, b"", doing="beginning")
        group.exchange([(1, memoryview(bytearray(2)))], [])  # half of what it waits for
        if reports_why:
            group.abort(WriterFailedError("rank 2 was killed", rank=2))
        raise KeyError("gone")

    first, second, _ = on_ranks(server, 3, meet, timeout_s=600)
    assert str(first) == str(second)
    assert first.rank == second.rank == 2
    message = "rank 2 was killed" if reports_why else "The connection to the writer process of rank 2 broke"
    assert message in str(first)


def test_a_rank_that_cannot_listen_is_named_by_all(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_on_another_host(client: Any, *, prefix: str, rank: int, host: str) -> Any:
        # 192.0.2.0/24 is for documentation: it is no address of this host.
        return open_transport(client, prefix=prefix, rank=rank, host="192.0.2.1" if rank else host)

    monkeypatch.setattr(writer_group, "open_transport", open_on_another_host)

    def act(group: WriterGroup) -> None:
        group.exchange([(1 - group.rank, memoryview(bytearray(4)))], [])

    for error in on_ranks(server, 2, act):
        assert isinstance(error, WriterFailedError)
        assert error.rank == 1
        assert "rank 1 cannot listen at localhost: Cannot resolve 192.0.2.1" in str(error)


def test_a_host_is_called_what_others_call_it() -> None:
    assert host_towards("localhost", 1) == "localhost"
    assert host_towards(socket.gethostname(), 1) == socket.gethostname()


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
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes that writers have started, which are none."""
    started: list[FakeProcess] = []

    def start(*_: object) -> ChildProcess:
        ours, theirs = socket.socketpair()
        process: Any = FakeProcess(Connection(theirs.detach()))
        started.append(process)
        return ChildProcess(process, Connection(ours.detach()))

    monkeypatch.setattr(writer_process, "start_writer", start)
    return started


@pytest.fixture
def writer(processes: list[FakeProcess]) -> Iterator[WriterProcess]:
    writer = WriterProcess(AsyncOptions(), memory=StagingMemory(), kind=(0, None, None), user=None)
    writer.begin()
    yield writer
    writer.close()


def submit(
    writer: WriterProcess, *, common: Any = None, on_failure: FailureHandler = lambda error: False
) -> SubmittedJob:
    number, start = writer.next_job()
    job = Job(
        number=number,
        label="step 7",
        attempt="a",
        location=CheckpointLocation(root="r", name="n"),
        strategy=b"",
        hooks=(),
        plan=0,
        exchanged=True,
        object_sizes=None,
        common=common,
        start=start,
        in_order=True,
        commit_fields={},
        unpadded={},
        keeps=False,
        verify=None,
    )
    return writer.submit(job, 0, lambda damages: None, on_failure)


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


@pytest.mark.parametrize("end", ["the save fails", "the process is lost", "the process was lost before"])
def test_what_follows_a_failure_may_wait_for_a_thread_that_uses_the_process(
    writer: WriterProcess, end: str
) -> None:
    """As the removal of files may, which waits for threads; one of them may submit or stage."""
    has_waited = []

    def wait_for_another_thread(error: Exception) -> bool:
        other = threading.Thread(target=writer.wait_until, args=(99,), daemon=True)
        other.start()
        other.join(5)
        has_waited.append(not other.is_alive())
        return True

    if end == "the process was lost before":
        writer.kill()
        wait_for(lambda: writer.is_lost)
    job = submit(writer, on_failure=wait_for_another_thread)
    if end == "the save fails":
        its_end(writer).send(EndedMessage(job.job.number, encode_error(WriterFailedError("full", rank=0))))
    elif end == "the process is lost":
        writer.kill()
    wait_for(lambda: job.is_over)
    assert has_waited == [True]
    assert job.error is None
    assert not writer.is_busy


def test_ctrl_c_while_a_late_job_fails_leaves_nothing_to_wait_for(writer: WriterProcess) -> None:
    def interrupt(error: Exception) -> bool:
        raise KeyboardInterrupt

    writer.kill()
    wait_for(lambda: writer.is_lost)
    with pytest.raises(KeyboardInterrupt):
        submit(writer, on_failure=interrupt)
    assert not writer.is_busy
    writer.wait_until(0)  # and does not hang


class FakeWriter:
    """A process that has a kind and a user, and may have ended."""

    def __init__(self, kind: Any, *, is_lost: bool = False, user: Any = None) -> None:
        self.kind, self.is_lost, self.user, self.is_ours = kind, is_lost, user, True
        self.closed_with_free_lock: bool | None = None
        self.rest, self.wait_until = Mock(), Mock()

    def close(self) -> None:
        is_free = session._LOCK.acquire(blocking=False)
        if is_free:
            session._LOCK.release()
        self.closed_with_free_lock = is_free


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that sessions know, instead of those of other tests."""
    known: list[Any] = []
    monkeypatch.setattr(session, "_WRITERS", known)
    return known


def test_an_ended_process_is_closed_while_other_threads_can_take_a_process(writers: list[Any]) -> None:
    """To close a process takes seconds if its threads wait for a store."""
    options = AsyncOptions()
    kind = (options.nice, options.ionice, None)
    lost, other, used, usable = (
        FakeWriter(kind, is_lost=True),
        FakeWriter("other"),
        FakeWriter(kind, user="another session"),
        FakeWriter(kind),
    )
    writers += [lost, other, used, usable]
    asking = session.WriterSession(options, None)
    asking.start()
    assert asking.writer is usable
    assert writers == [other, used, usable]
    assert [writer.user for writer in writers] == [None, "another session", asking]
    assert lost.closed_with_free_lock is True
    assert other.closed_with_free_lock is None


@pytest.mark.parametrize(
    ("keeps", "is_lost", "is_kept"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_session_leaves_its_process_to_the_next_one_if_that_can_use_it(
    keeps: bool, is_lost: bool, is_kept: bool, writers: list[Any]
) -> None:
    host = Mock()
    ending = session.WriterSession(AsyncOptions(), None, host=host)
    earlier, process = FakeWriter("kind"), FakeWriter("kind", is_lost=is_lost, user=ending)
    writers += [earlier, process]
    ending.end(keeps_writer=keeps)
    process.wait_until.assert_called_once_with(0)
    host.close.assert_called_once_with()
    (idle,) = writers
    assert idle is (process if is_kept else earlier)
    assert idle.user is None
    assert process.rest.called == is_kept
    assert (process.closed_with_free_lock, earlier.closed_with_free_lock) == (
        (None, True) if is_kept else (True, None)
    )


def interrupting(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is interrupted before its caller has its result."""

    def interrupted(*arguments: Any, **named: Any) -> None:
        act(*arguments, **named)
        raise KeyboardInterrupt

    return interrupted


def has_ended(process: FakeProcess) -> bool:
    """Whether a process was killed, or ends because its connection is closed."""
    if process.returncode is not None:
        return True
    try:
        return process.end.poll(5) and process.end.recv() is None
    except EOFError:
        return True


@pytest.mark.parametrize(
    ("at", "is_idle"),
    [
        ("WriterProcess", False),
        ("begin", False),
        ("_take_writer", False),
        ("_take_writer", True),
        ("start", False),
        ("start", True),
    ],
)
def test_ctrl_c_while_a_process_is_taken_leaves_no_process(
    writers: list[Any],
    processes: list[FakeProcess],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    is_idle: bool,
) -> None:
    if is_idle:
        AsyncSaver(AsyncOptions()).close()
    owner = {"begin": WriterProcess, "start": session.WriterSession}.get(at, session)
    with monkeypatch.context() as patched:
        patched.setattr(owner, at, interrupting(getattr(owner, at)))
        with pytest.raises(KeyboardInterrupt):
            AsyncSaver(AsyncOptions())
    gc.collect()
    assert writers == []
    (process,) = processes
    assert has_ended(process)


@pytest.mark.parametrize("at", ["wait_until", "rest", "close"])
def test_ctrl_c_while_a_saver_is_closed_leaves_no_process_in_use(
    writers: list[Any], processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    saver = AsyncSaver(AsyncOptions())
    with monkeypatch.context() as patched:
        patched.setattr(WriterProcess, at, interrupting(getattr(WriterProcess, at)))
        with pytest.raises(KeyboardInterrupt):
            saver.close() if at != "close" else saver.abandon()
    del saver
    gc.collect()
    assert writers == []
    assert has_ended(processes[0])


class Session:
    """A session without a process: writes down how many pending saves were waited for, and its ends."""

    def __init__(self) -> None:
        self.most_pending: list[int] = []
        self.ends: list[bool] = []
        self.jobs: list[Any] = []
        self.writer = SimpleNamespace(wait_until=self.most_pending.append, is_ours=True, kill=lambda: None)

    def start(self) -> None:
        """There is nothing to start."""

    def wait_staged(self) -> None:
        """Nothing is being copied."""

    def failure(self) -> None:
        """No save has failed."""

    def end(self, *, keeps_writer: bool) -> None:
        """Write down whether the process may be used again."""
        self.ends.append(keeps_writer)


@pytest.fixture
def fake_session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()
    monkeypatch.setattr(saver_module, "WriterSession", lambda options, hook: session)
    return session


@pytest.mark.parametrize(
    ("options", "waited_for"),
    [
        (AsyncOptions(when_busy="wait"), [0]),
        (AsyncOptions(when_busy="queue"), [3]),  # with the next one, four are pending
        (AsyncOptions(when_busy="skip"), []),
    ],
)
def test_a_save_waits_for_earlier_ones_as_long_as_its_option(
    fake_session: Session, options: AsyncOptions, waited_for: list[int]
) -> None:
    saver = AsyncSaver(options)
    saver.turn()
    assert fake_session.most_pending == waited_for
    saver.turn(waits=True)
    saver.close()
    assert fake_session.most_pending == [*waited_for, 0, 0]


@pytest.mark.parametrize(
    ("nbytes", "groups"), [(8, ["a", "bcd", "e", "f"]), (7, ["a", "b", "c", "d", "e", "f"])]
)
def test_neighbours_that_write_equal_bytes_are_staged_together_if_all_fit(
    fake_session: Session, monkeypatch: pytest.MonkeyPatch, nbytes: int, groups: list[str]
) -> None:
    plans = {
        name: SimpleNamespace(plan=plan, layout=SimpleNamespace(stop=8))
        for name, plan in zip("abcdef", [1, 2, 2, 2, 1, 2], strict=True)
    }
    monkeypatch.setattr(saver_module, "shares_bytes", lambda first, second: first.plan == second.plan)
    saver = AsyncSaver(AsyncOptions())
    fake_session.writer.memory = SimpleNamespace(nbytes=nbytes)
    shared = saver._shared_copies(list(plans.items()))
    assert ["".join(name for name, _ in group) for group in shared] == groups
    saver.close()


@pytest.mark.parametrize(("end", "is_kept"), [("close", True), ("abandon", False), (None, False)])
def test_a_saver_that_is_forgotten_ends_its_process_once_unless_it_was_closed(
    fake_session: Session, end: str | None, is_kept: bool
) -> None:
    saver = AsyncSaver(AsyncOptions())
    if end is not None:
        getattr(saver, end)()
    del saver
    gc.collect()
    assert fake_session.ends == [is_kept]


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


def test_what_is_not_staged_is_cancelled_once_and_the_process_does_not_wait_for_it(
    writer: WriterProcess,
) -> None:
    staged, unstaged = submit(writer), submit(writer)
    staged.is_staged = True
    assert writer.cancel_unstaged(ValueError("no memory")) == [unstaged]
    assert writer.cancel_unstaged(ValueError("no memory")) == []
    received: list[Any] = []
    while not received or not isinstance(received[-1], StagedMessage):
        received.append(its_end(writer).recv())
    cancelled = received[-2]
    assert (type(cancelled), cancelled.job) == (CancelledMessage, unstaged.job.number)
    assert "Rank 0 failed while copying its state: ValueError: no memory" in str(
        decode_error(cancelled.error)
    )
    assert received[-1] == StagedMessage(unstaged.stop)


def test_staging_waits_until_the_process_has_read_what_is_in_the_way(writer: WriterProcess) -> None:
    room: list[int] = []
    submit(writer)
    staging = threading.Thread(target=lambda: room.append(writer.room_from(5)), daemon=True)
    staging.start()
    wait_for(lambda: bool(writer._changed._waiters))  # type: ignore[attr-defined]  # it waits
    its_end(writer).send(ConsumedMessage(8))
    staging.join(20)
    assert room == [8]


@pytest.mark.parametrize("before", [None, "2"])
def test_the_environment_is_changed_for_processes_that_start_in_a_block_only(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGACKPT_TRIED", raising=False)
    if before is not None:
        monkeypatch.setenv("MEGACKPT_TRIED", before)
    with child_environment("MEGACKPT_TRIED", "1"):
        with child_environment("MEGACKPT_TRIED", "1"):
            assert os.environ["MEGACKPT_TRIED"] == "1"
        assert os.environ["MEGACKPT_TRIED"] == "1"
    assert os.environ.get("MEGACKPT_TRIED") == before


@pytest.mark.parametrize(
    ("name", "error"),
    [("pigeons", "names no transport. Known are gloo, nixl"), ("nixl", r"megackpt\[nixl\]")],
)
def test_a_transport_that_cannot_be_had_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.setenv(TRANSPORT_VARIABLE, name)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(DeclarationError, match=error):
        open_transport(None, prefix="p", rank=0, host="127.0.0.1")  # type: ignore[arg-type]
