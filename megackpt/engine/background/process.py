"""The writer process of this rank, as the training process sees it; its own side is in `writer_main`.

One thread sends messages to it and one receives messages from it. If the process shows no progress, or a
thread meets an error, the process is killed, and its jobs fail on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megackpt.comm.group import common_error, decode_error, encode_error
from megackpt.comm.store_host import StoreHost
from megackpt.engine.background.child_process import END_S, ProgressWatch, start_writer
from megackpt.engine.background.messages import (
    BEAT_S,
    CancelledMessage,
    CommittedMessage,
    ConsumedMessage,
    EndedMessage,
    FollowUpDoneMessage,
    ForgetPlanMessage,
    FromWriter,
    Job,
    JoinMessage,
    LeaveMessage,
    MemoryMessage,
    PlanMessage,
    ReadyMessage,
    StagedMessage,
    ToWriter,
    store_prefix,
)
from megackpt.engine.background.prepared_save import CommitHandler, FailureHandler, SubmittedJob
from megackpt.engine.background.staging_memory import StagingMemory, StreamClosedError
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.formats.damage import Damage
from megackpt.options import AsyncOptions
from megackpt.plans.planning import SavePlan

log = logging.getLogger(__name__)

_MAX_PLANS = 8  # that the process keeps
_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
"""How long a stuck writer process lives on after its deadline, or after other ranks have given up.

Other ranks know more about the failure, so their error should come first.
"""
_STUCK_ADVICE = " Look at the disk or mount that it writes to. Raise timeout_s if that is only slow."


class Outbox:
    """The messages that wait to be sent to a writer process, oldest first. Any thread may put one.

    One thread calls `send_all`: a full pipe blocks its sender, and training must not wait for that.
    """

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


class WriterProcess:
    """A process that writes the saves of this rank.

    The constructor starts it. If this object is dropped before `begin`, its connection closes and the
    process ends; from `begin` on it lives until `close`. Any thread may use it. To the thread that stages
    bytes it is a `StreamReader`.

    Attributes:
        memory: the staging memory that it shares.
        kind: what was decided at its start: niceness, class of I/O, and a hook for tests (see
            `jobs.StoreHook`).
        user: the session that uses it; None if it is idle.
    """

    def __init__(
        self,
        options: AsyncOptions,
        *,
        memory: StagingMemory,
        kind: tuple[int, str | None, str | None],
        user: object,
    ) -> None:
        self.memory, self.kind, self.user = memory, kind, user
        self._owner = os.getpid()
        self._start_timeout_s = options.start_timeout_s
        self._numbers = itertools.count()
        self._plans: list[tuple[int, SavePlan]] = []  # the plan that was used last is the last
        self._position = 0
        self._lock = threading.RLock()
        # Blocks enter the lock: Condition.__exit__ is Python code, and Ctrl-C in it could leave it locked.
        self._changed = threading.Condition(self._lock)
        self._is_ready = self._is_lost = False
        self._advice = ""
        self._consumed = self._capacity = 0  # positions of the stream
        self._jobs: list[SubmittedJob] = []
        self._rank = 0
        self._host: StoreHost | None = None
        self._timeout_s = 0.0
        self._outbox = Outbox()
        self._threads: list[threading.Thread] = []
        self._process = start_writer(kind, memory.descriptor)

    def begin(self) -> None:
        """Start the threads that exchange messages with it."""
        try:
            for work, name in (
                (self._receive_messages, "megackpt-listen"),
                (self._send_messages, "megackpt-send"),
            ):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()
        except BaseException:  # Ctrl-C: without both threads it is of no use
            self._process.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it. A forked child of the training process has not."""
        return os.getpid() == self._owner

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, so that another is needed."""
        return self._is_lost

    @property
    def is_busy(self) -> bool:
        """Whether there is a job that is not over."""
        return bool(self._jobs)

    def join(self, *, rank: int, size: int, host: StoreHost | None, timeout_s: float) -> None:
        """Set the rank that it writes for, and the store over which writers synchronise."""
        self._rank, self._host, self._timeout_s = rank, host, timeout_s
        address = host.address if host is not None else None
        self._outbox.put(JoinMessage(rank=rank, size=size, address=address, timeout_s=timeout_s))

    def resize(self, nbytes: int) -> None:
        """Change the size of the memory while no job is pending; do nothing if it has this size.

        Raises:
            StorageError: there is not enough memory.
        """
        self.memory.resize(nbytes)
        if self._capacity != self.memory.nbytes:
            # Sent before the capacity is noted: an interrupt in between repeats the message, and loses none.
            self._outbox.put(MemoryMessage(self.memory.nbytes))
            self._capacity = self.memory.nbytes

    def use_plan(self, plan: SavePlan) -> int:
        """Return the number of a plan; send it if it is not one of the plans that were used last."""
        # By identity: saves that use the same plan have the same object.
        numbered = next((recent for recent in self._plans if recent[1] is plan), None)
        if numbered is None:
            numbered = next(self._numbers), plan
            self._outbox.put(PlanMessage(*numbered))
        else:
            self._plans.remove(numbered)
        self._plans.append(numbered)
        self._forget_plans(_MAX_PLANS)
        return numbered[0]

    def next_job(self) -> tuple[int, int]:
        """Return the number of the next job, and the position of the stream at which it starts."""
        return next(self._numbers), self._position

    def submit(
        self, job: Job, nbytes: int, on_commit: CommitHandler, on_failure: FailureHandler
    ) -> SubmittedJob:
        """Add a job that `next_job` was called for.

        The job is sent with the first of its bytes that are staged. If it were sent earlier, the writer
        processes of all ranks would synchronise, and take processor time from the copy.

        If anything raises an error between this call and the end of staging, call `cancel_unstaged`.
        """
        submitted = SubmittedJob(job, self._position + nbytes, on_commit, on_failure)
        with self._lock:
            # The receiving thread fails the jobs that are here when the process is lost. A later job is never
            # pending: Ctrl-C while it is failed must leave nothing that others wait for.
            is_lost = self._is_lost
            if not is_lost:
                self._jobs.append(submitted)
        self._position = submitted.stop
        if is_lost:
            self._fail([submitted])
        return submitted

    def rest(self) -> None:
        """Forget the plans, the rank and the memory of a saver that is closed."""
        self._forget_plans(0)
        self.join(rank=0, size=1, host=None, timeout_s=0.0)
        self.resize(0)

    def cancel_unstaged(self, error: BaseException) -> list[SubmittedJob]:
        """Make the jobs that are not fully staged fail on all ranks, and return them."""
        cancelled = [submitted for submitted in self._jobs if not submitted.is_staged]
        for submitted in cancelled:
            # An interrupt in `submit` may have left the position before the bytes of this job.
            self._position = max(self._position, submitted.stop)
            self._send_jobs()
            self._outbox.put(CancelledMessage(submitted.job.number, self.abort(submitted.job.attempt, error)))
            self._outbox.put(StagedMessage(submitted.stop))
            submitted.is_staged = True
        return cancelled

    def abort(self, attempt: str, error: BaseException) -> bytes:
        """Make a save fail on all ranks because this rank cannot copy its state; return the encoded error."""
        data = encode_error(common_error({self._rank: encode_error(error)}, "copying its state"))
        if self._host is not None:
            self._host.abort(store_prefix(attempt), data)
        return data

    def room_from(self, position: int) -> int:
        """Return up to which position the stream may be written; see `StreamReader`."""
        with self._lock:  # without a deadline: the receiving thread kills a process without progress
            self._changed.wait_for(
                lambda: self._is_lost or not self._jobs or self._consumed + self._capacity > position
            )
            if self._is_lost or not self._jobs:
                raise StreamClosedError
            return self._consumed + self._capacity

    def report_staged(self, position: int) -> None:
        """Report to the process that the stream is written up to a position."""
        self._send_jobs()
        self._outbox.put(StagedMessage(position))

    def wait_ready(self) -> None:
        """Return when it has started.

        Raises:
            RankFailedError: it could not start, or took too long.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._is_ready or self._is_lost, self._start_timeout_s)
        if not self._is_ready:
            how = f"has not started after {self._start_timeout_s:g} s"
            if self._is_lost:
                how = f"{self._process.how_it_ended()} before it had started"
            raise RankFailedError(
                f"The writer process of rank {self._rank} {how}. Its output says why.",
                rank=self._rank,
            )

    def wait_until(self, count: int) -> None:
        """Wait until at most count jobs are pending. Does not raise their errors.

        A process that hangs is killed once other ranks have given up waiting for it.
        """
        given_up: dict[str, float] = {}  # when other ranks gave up waiting, by the attempt of the job
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: len(self._jobs) <= count, _LOOK_EVERY_S):
                    return
                # Jobs are done one after the other, so only the first one can be the job that hangs.
                first = self._jobs[0]
            attempt = first.job.attempt
            if self._host is None or not self._host.is_aborted(store_prefix(attempt)):
                continue
            if time.monotonic() - given_up.setdefault(attempt, time.monotonic()) > _GRACE_S:
                self._process.kill()

    def close(self) -> None:
        """End the process, and release the memory. Pending jobs are lost."""
        if not self.is_ours:
            return
        self._outbox.put(LeaveMessage())
        self._outbox.close()
        if not self._is_lost:
            self._process.end()
        if not self._process.has_ended():
            text = "The writer process %s is killed, and does not end: the system waits for a disk."
            log.warning(text, self.pid)
        for thread in self._threads:
            is_started = thread.ident is not None
            if is_started and thread is not threading.current_thread():  # garbage is collected in any thread
                thread.join(END_S)
        # The threads use the connection, so it is closed after them.
        self._process.connection.close()
        self.memory.close()

    def kill(self) -> None:
        """End the process immediately. Pending jobs fail."""
        self._process.kill()

    def _send_jobs(self) -> None:
        for submitted in list(self._jobs):
            if not submitted.is_sent:
                self._outbox.put(submitted)  # perhaps again, if this was interrupted

    def _forget_plans(self, most: int) -> None:
        while len(self._plans) > most:
            self._outbox.put(ForgetPlanMessage(self._plans.pop(0)[0]))

    def _send_messages(self) -> None:
        try:
            self._outbox.send_all(self._process.connection)
        except Exception as error:  # noqa: BLE001 - handed over to all ranks
            self._process.kill(f"could not be sent a message ({type(error).__name__}: {error})")

    def _receive_messages(self) -> None:
        """Handle messages until the process has ended. Whatever happens, no job waits for ever."""
        watch = ProgressWatch(self.pid)
        try:
            while not self._process.why_killed:
                if self._process.connection.poll(BEAT_S):
                    watch.reset()
                    self._handle(self._process.connection.recv())
                else:
                    self._check(watch)
        except (EOFError, OSError):
            pass  # it has ended, or is ended below
        except Exception as error:  # noqa: BLE001 - handed over to all ranks
            self._process.kill(f"sent a message that could not be handled ({type(error).__name__}: {error})")
        # First of all: the process must not go on writing when its jobs fail on all ranks, and their error
        # names its exit code.
        self._process.end()
        with self._lock:
            self._is_lost, lost = True, list(self._jobs)
            self._changed.notify_all()
        self._fail(lost)

    def _handle(self, message: FromWriter) -> None:
        if isinstance(message, CommittedMessage):
            # The job stays pending until the process has received the outcome and sends `EndedMessage`.
            arguments = self._submitted(message.job), message.damages
            name = "megackpt-follow"
            threading.Thread(target=self._follow_up, args=arguments, name=name, daemon=True).start()
            return
        if isinstance(message, EndedMessage):
            error = decode_error(message.error) if message.error is not None else None
            self._end(self._submitted(message.job), error)
            return
        with self._lock:
            if isinstance(message, ConsumedMessage):
                self._consumed = message.position
            elif isinstance(message, ReadyMessage):
                self._is_ready = True
            self._changed.notify_all()

    def _check(self, watch: ProgressWatch) -> None:
        """Kill a process that has work and has shown no progress for too long."""
        with self._lock:
            first = self._jobs[0] if self._jobs else None
            # While `on_commit` runs, the process waits for this one. Of a job that was not sent it knows
            # nothing.
            is_idle = first is None or first.is_followed_up or not first.is_sent
        if is_idle:
            watch.reset()
            return
        watch.check()
        # A process that imports torch sends no heartbeat. How long that may take has an option of its own.
        if not self._is_ready and watch.silent_s > self._start_timeout_s:
            self._kill_stuck(f"had not started after {self._start_timeout_s:g} s")
        elif self._is_ready and watch.silent_s > self._timeout_s + _GRACE_S:
            self._kill_stuck(f"made no progress for {self._timeout_s:g} s")

    def _kill_stuck(self, reason: str) -> None:
        self._advice = _STUCK_ADVICE
        self._process.kill(reason)

    def _follow_up(self, submitted: SubmittedJob, damages: Sequence[Damage] | None) -> None:
        """Do the work after a commit in its own thread: the receiving thread has to watch the process."""
        error: bytes | None = None
        submitted.is_followed_up = True
        try:
            submitted.on_commit(damages)
        except Exception as raised:  # noqa: BLE001 - handed over to all ranks
            error = encode_error(raised)
        # The process waits for this message whatever `on_commit` has done: without it the job would never be
        # over.
        self._outbox.put(FollowUpDoneMessage(submitted.job.number, error))
        submitted.is_followed_up = False

    def _submitted(self, job: int) -> SubmittedJob:
        return next(submitted for submitted in self._jobs if submitted.job.number == job)

    def _end(self, submitted: SubmittedJob, error: CheckpointError | None) -> None:
        """End a job. It stays pending until `on_failure` has returned."""
        # Without the lock: it does work in storage, and may wait for a thread that needs the lock.
        if error is not None and _is_handled(submitted, error):
            error = None
        with self._lock:
            submitted.error, submitted.is_over = error, True
            if submitted in self._jobs:
                self._jobs.remove(submitted)
            self._changed.notify_all()

    def _fail(self, lost: Sequence[SubmittedJob]) -> None:
        """Make jobs fail, here and on other ranks, because the process has ended."""
        errors = [self._lost_on_all_ranks(submitted) for submitted in lost]
        for submitted, error in zip(lost, errors, strict=True):
            self._end(submitted, error)

    def _lost_on_all_ranks(self, submitted: SubmittedJob) -> CheckpointError:
        """Make a job fail on other ranks; return the error that all ranks raise."""
        error = self._loss_of(submitted)
        if self._host is None:
            return error
        first = self._host.abort(store_prefix(submitted.job.attempt), encode_error(error))
        # The writer of rank 0 waits until all ranks have left. A lost process cannot leave by itself.
        self._host.leave(store_prefix(submitted.job.attempt))
        return decode_error(first)

    def _loss_of(self, submitted: SubmittedJob) -> WriterFailedError:
        how = self._process.how_it_ended()
        return WriterFailedError(
            f"The writer process of rank {self._rank} (process {self.pid}) {how} while saving "
            f"{submitted.job.label}. It is started again for the next save.{self._advice}",
            rank=self._rank,
        )


def _is_handled(submitted: SubmittedJob, error: CheckpointError) -> bool:
    """Do what follows a failure; return whether the error is not to be raised any more."""
    try:
        return submitted.on_failure(error)
    except Exception as another:  # noqa: BLE001 - the first error is the one that is raised
        log.warning("After %s has failed: %s", submitted.job.label, another)
        return False
