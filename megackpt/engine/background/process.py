"""The writer process of this rank, as the training process sees it; its own side is in `writer_main`.

One thread sends messages to it and one receives messages from it. A process that shows no progress is killed,
and its jobs fail on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import threading
import time

from megackpt.comm.messages import common_error, decode_error, encode_error
from megackpt.comm.store_host import StoreHost
from megackpt.engine.background.heartbeat import BEAT_S, ProgressWatch
from megackpt.engine.background.messages import (
    CancelledMessage,
    CommittedMessage,
    ConsumedMessage,
    EndedMessage,
    FollowUpDoneMessage,
    ForgetPlanMessage,
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
from megackpt.engine.background.process_start import start_writer
from megackpt.engine.background.staging_memory import StagingMemory, StreamClosedError
from megackpt.engine.saving.save_hook import PlanCompletion
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.options import AsyncOptions
from megackpt.planning import SavePlan

log = logging.getLogger(__name__)

_END_S = 5.0
_MAX_PLANS = 8  # that the process keeps
_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
"""How long a stuck writer process lives on after its deadline, or after other ranks have given up.

Other ranks know more about the failure, so their error should come first.
"""
_STUCK_ADVICE = " Look at the disk or mount that it writes to. Raise timeout_s if that is only slow."


class WriterProcess:
    """A process that writes the saves of this rank.

    Any thread may use it. To the thread that stages bytes it is a `StreamReader`.

    Attributes:
        memory: the staging memory that it shares.
        kind: what was decided at its start: niceness, class of I/O, and a hook for tests (see
            `jobs.StoreHook`).
    """

    def __init__(
        self, options: AsyncOptions, *, memory: StagingMemory, kind: tuple[int, str | None, str | None]
    ) -> None:
        self.memory, self.kind = memory, kind
        self._owner = os.getpid()
        self._start_timeout_s = options.start_timeout_s
        self._numbers = itertools.count()
        self._plans: list[tuple[int, SavePlan]] = []  # the plan that was used last is the last
        self._position = 0
        self._lock = threading.RLock()
        # Blocks enter the lock: Condition.__exit__ is Python code, in which Ctrl-C could keep it locked.
        self._changed = threading.Condition(self._lock)
        self._is_ready = self._is_lost = self._is_stuck = False
        self._consumed = self._capacity = 0  # positions of the stream
        self._jobs: list[SubmittedJob] = []
        self._rank = 0
        self._host: StoreHost | None = None
        self._timeout_s = 0.0
        self._outbox: queue.SimpleQueue[ToWriter | SubmittedJob | None] = queue.SimpleQueue()
        self._process, self._connection = start_writer(kind, memory.descriptor)
        try:
            self._threads = [
                threading.Thread(target=self._receive_messages, name="megackpt-listen", daemon=True),
                threading.Thread(target=self._send_messages, name="megackpt-send", daemon=True),
            ]
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C: nobody will know of the process
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
        """Set for which rank it writes, and over which store writers synchronise."""
        self._rank, self._host, self._timeout_s = rank, host, timeout_s
        address = host.address if host is not None else None
        self._send(JoinMessage(rank=rank, size=size, address=address, timeout_s=timeout_s))

    def resize(self, nbytes: int) -> None:
        """Change the size of the memory while no job is pending; do nothing if it has this size.

        Raises:
            StorageError: there is not enough memory.
        """
        self.memory.resize(nbytes)
        if self._capacity != self.memory.nbytes:
            # Sent before the capacity is noted: an interrupt in between repeats the message, and loses none.
            self._send(MemoryMessage(self.memory.nbytes))
            self._capacity = self.memory.nbytes

    def use_plan(self, plan: SavePlan, complete: PlanCompletion | None) -> int:
        """Return the number of a plan; send it if it is not one of the plans that were used last."""
        # By identity: saves that use the same plan have the same object.
        numbered = next((recent for recent in self._plans if recent[1] is plan), None)
        if numbered is None:
            numbered = next(self._numbers), plan
            self._send(PlanMessage(*numbered, complete))
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
            self._jobs.append(submitted)
            is_lost = self._is_lost
        self._position = submitted.stop
        if is_lost:
            self._fail_all()
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
            self._position = max(self._position, submitted.stop)
            self._send_jobs()
            self._send(CancelledMessage(submitted.job.number, self.abort(submitted.job.attempt, error)))
            self._send(StagedMessage(submitted.stop))
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
        self._send(StagedMessage(position))

    def wait_ready(self) -> None:
        """Return when it has started.

        Raises:
            RankFailedError: it could not start, or took too long.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._is_ready or self._is_lost, self._start_timeout_s)
        if not self._is_ready:
            how = self._how_it_ended() if self._is_lost else f"needs over {self._start_timeout_s:g} s"
            raise RankFailedError(
                f"The writer process of rank {self._rank} {how} to start. Its output says why.",
                rank=self._rank,
            )

    def wait_until(self, count: int) -> None:
        """Wait until at most count jobs are pending. Does not raise their errors.

        A process that hangs is killed once other ranks have given up waiting for it.
        """
        given_up: float | None = None
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: len(self._jobs) <= count, _LOOK_EVERY_S):
                    return
                first = self._jobs[0]
            if self._host is None or not self._host.is_aborted(store_prefix(first.job.attempt)):
                continue
            given_up = given_up or time.monotonic()
            if time.monotonic() - given_up > _GRACE_S:
                self._process.kill()

    def close(self) -> None:
        """End the process, and release the memory. Pending jobs are lost."""
        if not self.is_ours:
            return
        self._send(LeaveMessage())
        self._outbox.put(None)
        if not self._is_lost and not self._has_ended():
            self._process.kill()
            self._has_ended()
        if not self._has_ended(0.0):
            text = "The writer process %s is killed, and does not end: the system waits for a disk."
            log.warning(text, self.pid)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in any thread
                thread.join(_END_S)
        self._connection.close()
        self.memory.close()

    def kill(self) -> None:
        """End the process immediately. Pending jobs fail."""
        self._process.kill()

    def _send(self, message: ToWriter) -> None:
        """Send a message later, in the order of calls."""
        self._outbox.put(message)

    def _send_jobs(self) -> None:
        for submitted in list(self._jobs):
            if not submitted.is_sent:
                self._outbox.put(submitted)  # perhaps again, if this was interrupted

    def _forget_plans(self, most: int) -> None:
        while len(self._plans) > most:
            self._send(ForgetPlanMessage(self._plans.pop(0)[0]))

    def _send_messages(self) -> None:
        while (message := self._outbox.get()) is not None:
            if isinstance(message, SubmittedJob):
                if message.is_sent:
                    continue
                message.is_sent = True
                message = message.job
            with contextlib.suppress(OSError):  # it has ended, which the receiving thread notices
                self._connection.send(message)

    def _receive_messages(self) -> None:
        watch = ProgressWatch(self.pid)
        with contextlib.suppress(EOFError, OSError):
            while not self._is_stuck:
                if not self._connection.poll(BEAT_S):
                    self._check(watch)
                    continue
                message = self._connection.recv()
                watch.reset()
                if isinstance(message, CommittedMessage):
                    arguments, name = (message,), "megackpt-follow"
                    threading.Thread(target=self._follow_up, args=arguments, name=name, daemon=True).start()
                    continue
                with self._lock:
                    if isinstance(message, ConsumedMessage):
                        self._consumed = message.position
                    elif isinstance(message, EndedMessage):
                        error = decode_error(message.error) if message.error is not None else None
                        self._end(self._submitted(message.job), error)
                    elif isinstance(message, ReadyMessage):
                        self._is_ready = True
                    self._changed.notify_all()
        self._has_ended()
        with self._lock:
            self._is_lost = True
        self._fail_all()

    def _check(self, watch: ProgressWatch) -> None:
        """Kill a process that has work and has shown no progress for too long."""
        with self._lock:
            first = self._jobs[0] if self._jobs else None
            is_idle = first is None or first.is_followed_up or not first.is_sent
        if is_idle:
            watch.reset()
            return
        watch.check()
        most = self._timeout_s + _GRACE_S if self._is_ready else self._start_timeout_s
        if watch.silent_s > most:
            self._is_stuck = True
            self._process.kill()

    def _has_ended(self, most_s: float | None = None) -> bool:
        """Return whether the process ends within most_s; one that is stuck in the kernel cannot be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if most_s is None else most_s)
        return self._process.returncode is not None

    def _follow_up(self, committed: CommittedMessage) -> None:
        """Do the work after a commit in its own thread: the receiving thread has to watch the process."""
        error: bytes | None = None
        submitted = self._submitted(committed.job)
        submitted.is_followed_up = True
        try:
            submitted.on_commit(committed.damages)
        except Exception as raised:  # noqa: BLE001 - handed over to all ranks
            error = encode_error(raised)
        self._send(FollowUpDoneMessage(committed.job, error))
        submitted.is_followed_up = False

    def _submitted(self, job: int) -> SubmittedJob:
        return next(submitted for submitted in self._jobs if submitted.job.number == job)

    def _end(self, submitted: SubmittedJob, error: CheckpointError | None) -> None:
        if error is not None:
            try:
                error = None if submitted.on_failure(error) else error
            except Exception as another:  # noqa: BLE001 - the first error is the one that is raised
                log.warning("After %s has failed: %s", submitted.job.label, another)
        submitted.error, submitted.is_over = error, True
        self._jobs.remove(submitted)

    def _fail_all(self) -> None:
        """Make all jobs fail, here and on other ranks, because the process has ended."""
        with self._lock:
            lost = list(self._jobs)
        # Without the lock: the store may take seconds to answer.
        errors = [self._lost_on_all_ranks(submitted) for submitted in lost]
        with self._lock:
            for submitted, error in zip(lost, errors, strict=True):
                if not submitted.is_over:
                    self._end(submitted, error)
            self._changed.notify_all()

    def _lost_on_all_ranks(self, submitted: SubmittedJob) -> CheckpointError:
        """Make a job fail on other ranks; return the error that all ranks raise."""
        error = self._loss_of(submitted)
        if self._host is None:
            return error
        first = self._host.abort(store_prefix(submitted.job.attempt), encode_error(error))
        self._host.leave(store_prefix(submitted.job.attempt))
        return decode_error(first)

    def _loss_of(self, submitted: SubmittedJob) -> WriterFailedError:
        advice = _STUCK_ADVICE if self._is_stuck else ""
        return WriterFailedError(
            f"The writer process of rank {self._rank} (process {self.pid}) {self._how_it_ended()} while "
            f"saving {submitted.job.label}. It is started again for the next save.{advice}",
            rank=self._rank,
        )

    def _how_it_ended(self) -> str:
        if self._is_stuck and self._is_ready:
            return f"made no progress for {self._timeout_s:g} s and was killed"
        if self._is_stuck:
            return f"had not started after {self._start_timeout_s:g} s and was killed"
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
