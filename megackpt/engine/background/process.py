"""The writer process of this rank, as the training sees it.

Owns ending it, giving it up when it is stuck, the threads that speak to it, and what is known of its jobs.
What it does is in `main`; what ranks agree on, in `saver`.
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
from collections.abc import Callable

from megackpt.comm.messages import common_error, decode_error, encode_error
from megackpt.comm.store_group import StoreHost
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
    meetings_of,
)
from megackpt.engine.background.process_start import start_writer
from megackpt.engine.background.staging import StreamClosedError
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.engine.background.submitted_job import CommitHandler, FailureHandler, SubmittedJob
from megackpt.engine.saving.plan_agreement import PlanCompletion
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.options import AsyncOptions
from megackpt.planning import SavePlan

log = logging.getLogger(__name__)

_END_S = 5.0
_PLANS = 8  # that it keeps
_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
"""How long a writer may be stuck after its time is up, or other ranks have given it up, before it is killed.

Others see more: they are to be the first to say what is wrong.
"""


class WriterProcess:
    """A process that is there for this rank's saves, and for nothing else.

    Any thread may use it; `StreamReader` for the one that stages.

    Attributes:
        arena: the memory that it shares.
        kind: what was decided at its start: niceness, class of I/O, and a hook for tests (see
            `main.Hook`).
    """

    def __init__(
        self, options: AsyncOptions, *, arena: StagingMemory, kind: tuple[int, str | None, str | None]
    ) -> None:
        self.arena, self.kind = arena, kind
        self._owner = os.getpid()
        self._start_timeout_s = options.start_timeout_s
        self._numbers = itertools.count()
        self._plans: list[tuple[int, SavePlan]] = []  # the one used last is the last
        self._position = 0
        self._news = threading.Condition()
        self._is_ready = self._is_lost = False
        self._consumed = 0
        self._capacity = 0
        self._under_way: list[SubmittedJob] = []
        self._rank = 0
        self._host: StoreHost | None = None
        self._timeout_s = 0.0
        self._is_stuck = False
        self._outbox: queue.SimpleQueue[ToWriter | SubmittedJob | None] = queue.SimpleQueue()
        self._process, self._connection = start_writer(kind, arena.descriptor)
        try:
            threads = {"listen": self._listen, "send": self._speak}
            self._threads = [
                threading.Thread(target=run, name=f"megackpt-{name}", daemon=True)
                for name, run in threads.items()
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
        """Whether this process has started it: a fork of the training, of data loaders say, has not."""
        return os.getpid() == self._owner

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, so that another is needed."""
        return self._is_lost

    @property
    def is_busy(self) -> bool:
        """Whether there is a job that is not over."""
        return bool(self._under_way)

    def join(self, *, rank: int, size: int, host: StoreHost | None, timeout_s: float) -> None:
        """Tell it which rank it writes for, and where writers meet."""
        self._rank, self._host, self._timeout_s = rank, host, timeout_s
        address = host.address if host is not None else None
        self._send(JoinMessage(rank=rank, size=size, address=address, timeout_s=timeout_s))

    def resize(self, nbytes: int) -> None:
        """Give the memory another size, when nothing is under way; it may have that already.

        Raises:
            StorageError: there is not as much.
        """
        self.arena.resize(nbytes)
        if self._capacity != self.arena.nbytes:
            self._send(MemoryMessage(self.arena.nbytes))  # first: it may be sent twice, but not be left out
            self._capacity = self.arena.nbytes

    def use_plan(self, plan: SavePlan, complete: PlanCompletion | None) -> int:
        """Return the number of a plan; it is sent if it is not one of those that were used last."""
        known = next((one for one in self._plans if one[1] is plan), None)
        if known is None:
            known = next(self._numbers), plan
            self._send(PlanMessage(*known, complete))
        else:
            self._plans.remove(known)
        self._plans.append(known)
        self._forget_plans(_PLANS)
        return known[0]

    def begin(
        self,
        make: Callable[[int, int], Job],
        nbytes: int,
        follow: CommitHandler,
        failed: FailureHandler,
    ) -> SubmittedJob:
        """Take up a job, made of a number and the position at which its part of the stream begins.

        The process hears of it with the first bytes of it that are there: until then it, and through the
        first meeting of writers those of other ranks, would only take processor time from the copy.

        Whatever is raised from here on until the job is staged, `cancel_unstaged` has to be called.
        """
        job = make(next(self._numbers), self._position)
        work = SubmittedJob(job, self._position + nbytes, follow, failed)
        with self._news:
            self._under_way.append(work)
            is_lost = self._is_lost
        self._position = work.stop
        if is_lost:
            self._fail_all()
        return work

    def rest(self) -> None:
        """Let go of what belongs to a user that has gone."""
        self._forget_plans(0)
        self.join(rank=0, size=1, host=None, timeout_s=0.0)
        self.resize(0)

    def cancel_unstaged(self, error: BaseException) -> list[SubmittedJob]:
        """Let the jobs fail, on all ranks, of which not all could be staged; return them."""
        cancelled = [work for work in self._under_way if not work.is_staged]
        for work in cancelled:
            self._position = max(self._position, work.stop)
            self._tell_jobs()
            self._send(CancelledMessage(work.job.number, self.abort(work.job.attempt, error)))
            self._send(StagedMessage(work.stop))
            work.is_staged = True
        return cancelled

    def abort(self, attempt: str, error: BaseException) -> bytes:
        """Let a save fail on the other ranks, as its state is not copied here; return what they are sent."""
        data = encode_error(common_error({self._rank: encode_error(error)}, "copying its state"))
        if self._host is not None:
            self._host.abort(meetings_of(attempt), data)
        return data

    def room_from(self, position: int) -> int:
        """Return up to where the stream may be written; see `StreamReader`."""
        with self._news:
            self._news.wait_for(
                lambda: self._is_lost or not self._under_way or self._consumed + self._capacity > position
            )
            if self._is_lost or not self._under_way:
                raise StreamClosedError
            return self._consumed + self._capacity

    def room_for_next(self, nbytes: int) -> int | None:
        """Return where the stream of the next job begins if all of it has room by now, else None."""
        with self._news:
            fits = self._position + nbytes <= self._consumed + self._capacity and not self._is_lost
        return self._position if fits else None

    def tell_staged(self, position: int) -> None:
        """Say that the stream is there up to a position."""
        self._tell_jobs()
        self._send(StagedMessage(position))

    def wait_ready(self) -> None:
        """Return when it has started.

        Raises:
            RankFailedError: it could not, or took too long.
        """
        with self._news:
            self._news.wait_for(lambda: self._is_ready or self._is_lost, self._start_timeout_s)
        if not self._is_ready:
            how = self._how_it_ended() if self._is_lost else f"needs over {self._start_timeout_s:g} s"
            raise RankFailedError(
                f"The writer process of rank {self._rank} {how} to start. What it has printed says why.",
                rank=self._rank,
            )

    def wait_until(self, count: int) -> None:
        """Return when at most count jobs are under way. Their errors are not raised here.

        A process that hangs is killed once other ranks have given up waiting for it.
        """
        given_up: float | None = None
        while True:
            with self._news:
                if self._news.wait_for(lambda: len(self._under_way) <= count, _LOOK_EVERY_S):
                    return
                first = self._under_way[0]
            if self._host is None or not self._host.is_aborted(meetings_of(first.job.attempt)):
                continue
            given_up = given_up or time.monotonic()
            if time.monotonic() - given_up > _GRACE_S:
                self._process.kill()

    def close(self) -> None:
        """End it, and let go of the memory. Jobs that are under way are lost."""
        if not self.is_ours:
            return
        self._send(LeaveMessage())
        self._outbox.put(None)
        if not self._is_lost and not self._has_ended():
            self._process.kill()
            self._has_ended()
        if not self._has_ended(0.0):
            log.warning(
                "The writer process %s is killed, and does not end: the system waits for a disk.", self.pid
            )
        for thread in self._threads:
            if thread is not threading.current_thread():  # where the collector of garbage may run
                thread.join(_END_S)
        self._connection.close()
        self.arena.close()

    def kill(self) -> None:
        """Let it end at once. Jobs that are under way fail."""
        self._process.kill()

    def _send(self, message: ToWriter) -> None:
        """Send a message, sooner or later; what comes after it is sent after it."""
        self._outbox.put(message)

    def _tell_jobs(self) -> None:
        for work in list(self._under_way):
            if not work.is_told:
                self._outbox.put(work)  # perhaps again, if this was interrupted

    def _forget_plans(self, most: int) -> None:
        while len(self._plans) > most:
            self._send(ForgetPlanMessage(self._plans.pop(0)[0]))

    def _speak(self) -> None:
        while (message := self._outbox.get()) is not None:
            if isinstance(message, SubmittedJob):
                if message.is_told:
                    continue
                message.is_told = True
                message = message.job
            with contextlib.suppress(OSError):  # it has ended, which the other thread finds
                self._connection.send(message)

    def _listen(self) -> None:
        watch = ProgressWatch(self.pid)
        with contextlib.suppress(EOFError, OSError):
            while not self._is_stuck:
                if not self._connection.poll(BEAT_S):
                    self._look(watch)
                    continue
                message = self._connection.recv()
                watch.heard()
                if isinstance(message, CommittedMessage):
                    threading.Thread(
                        target=self._follow, args=(message,), name="megackpt-follow", daemon=True
                    ).start()
                    continue
                with self._news:
                    if isinstance(message, ConsumedMessage):
                        self._consumed = message.position
                    elif isinstance(message, EndedMessage):
                        error = decode_error(message.error) if message.error is not None else None
                        self._end(self._work(message.job), error)
                    elif isinstance(message, ReadyMessage):
                        self._is_ready = True
                    self._news.notify_all()
        self._has_ended()
        with self._news:
            self._is_lost = True
        self._fail_all()

    def _look(self, watch: ProgressWatch) -> None:
        """Kill a process that has work, and has shown no sign of progress for too long."""
        with self._news:
            first = self._under_way[0] if self._under_way else None
            is_idle = first is None or first.is_followed or not first.is_told
        if is_idle:
            watch.heard()
            return
        watch.look()
        most = self._timeout_s + _GRACE_S if self._is_ready else self._start_timeout_s
        if watch.silent_s > most:
            self._is_stuck = True
            self._process.kill()

    def _has_ended(self, most_s: float | None = None) -> bool:
        """Wait a while for the end of the process; one that is stuck in the kernel may not be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if most_s is None else most_s)
        return self._process.returncode is not None

    def _follow(self, committed: CommittedMessage) -> None:
        """Do what follows a commit, outside of the thread that listens: it may take long."""
        error: bytes | None = None
        work = self._work(committed.job)
        work.is_followed = True
        try:
            work.follow(committed.damages)
        except Exception as raised:  # noqa: BLE001 - handed over to all ranks
            error = encode_error(raised)
        self._send(FollowUpDoneMessage(committed.job, error))
        work.is_followed = False

    def _work(self, job: int) -> SubmittedJob:
        return next(work for work in self._under_way if work.job.number == job)

    def _end(self, work: SubmittedJob, error: CheckpointError | None) -> None:
        if error is not None:
            try:
                error = None if work.failed(error) else error
            except Exception as another:  # noqa: BLE001 - the first error is the one that is raised
                log.warning("After %s has failed: %s", work.job.label, another)
        work.error, work.is_over = error, True
        self._under_way.remove(work)

    def _fail_all(self) -> None:
        """Let all jobs fail, here and on other ranks, because the process has ended."""
        with self._news:
            lost = list(self._under_way)
        errors = [self._lost_on_all_ranks(work) for work in lost]  # others wait for the lock only shortly
        with self._news:
            for work, error in zip(lost, errors, strict=True):
                if not work.is_over:
                    self._end(work, error)
            self._news.notify_all()

    def _lost_on_all_ranks(self, work: SubmittedJob) -> CheckpointError:
        """Let a job fail on other ranks; return the error with which all fail."""
        error = self._lost(work)
        if self._host is None:
            return error
        first = self._host.abort(meetings_of(work.job.attempt), encode_error(error))
        self._host.leave(meetings_of(work.job.attempt))
        return decode_error(first)

    def _lost(self, work: SubmittedJob) -> WriterFailedError:
        look = " Look at the disk or mount that it writes to. Raise timeout_s if that is only slow."
        advice = look if self._is_stuck else ""
        return WriterFailedError(
            f"The writer process of rank {self._rank} (process {self.pid}) {self._how_it_ended()} while "
            f"saving {work.job.label}. It is started again for the next save.{advice}",
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
