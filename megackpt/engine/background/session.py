"""The resources of a rank between asynchronous saves: writer process, memory, and the store of all writers.

A session starts another process if one has ended, sizes the memory, and connects the writers of all ranks.

The start of a process takes seconds of processor time, most of them for the import of torch. So a process
that is no longer used waits, without staging memory, for the next saver with the same options. The writer
process ends when the training process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megackpt.comm import Group, encode_error
from megackpt.comm.group import decode_error
from megackpt.comm.store_host import StoreHost, host_store
from megackpt.engine.background.prepared_save import PreparedSave, SubmittedJob
from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.engine.saving.preparation import WRITER_STATUS, WriterStatus
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.options import AsyncOptions
from megackpt.plans.planning import SavePlan

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WriterSession:
    """A writer process, the memory that is shared with it, and what was sent to it.

    It does not refer to the saver, so that it can be ended when the saver is garbage. It exists before its
    process, and every process that has it as its user ends with it: Ctrl-C at any moment leaks none.

    Attributes:
        options: how to save.
        hook: wraps stores, for tests; see `jobs.StoreHook`.
        writer: the process that was taken last, from `start` on; it may have ended.
        host: the store over which writers synchronise; None for one rank, or before the first save.
        joined: rank and size of the group whose writers are connected; None if they have to be connected.
        timeout_s: how long writers wait for each other, in seconds.
        allocation: the thread that allocates memory before the first save, if there is one.
        jobs: jobs whose error was not raised yet.
        staging: the thread that copies the state, if there is one.
        plans_with_room: the last plans for which all ranks have had room.
        unraised: an error that is to be raised on all ranks when they have exchanged their status.
    """

    options: AsyncOptions
    hook: str | None
    writer: WriterProcess = field(init=False)
    host: StoreHost | None = None
    joined: tuple[int, int] | None = None
    timeout_s: float = 0.0
    allocation: threading.Thread | None = None
    jobs: list[SubmittedJob] = field(default_factory=list)
    staging: threading.Thread | None = None
    plans_with_room: deque[SavePlan] = field(default_factory=lambda: deque(maxlen=8))
    unraised: CheckpointError | None = None

    def start(self) -> None:
        """Start a process or take an idle one; allocate its memory in a thread, if the size is known."""
        self.writer = _take_writer(self)
        if self.options.staging_bytes is not None:
            self.allocation = threading.Thread(
                target=_allocate, args=(self.writer, self.options.staging_bytes), daemon=True
            )
            self.allocation.start()

    def running(self) -> WriterProcess:
        """Return the process; if it has ended, another one with as much memory."""
        if self.writer.is_lost:
            nbytes = self.writer.memory.nbytes
            _close_writer(self.writer)
            writer = _take_writer(self)
            if self.joined is not None:  # first: a writer without connections writes as a single process
                self._send_join(writer, *self.joined)
            # Known before it is resized: if there is not enough memory, the next save finds this process and
            # tries again.
            self.writer = writer
            self.writer.resize(nbytes)
        return self.writer

    def connect(self, group: Group, *, timeout_s: float) -> None:
        """Host a store for the writers of a group, and send this rank's writer its address. Collective.

        Raises:
            RankFailedError: a rank cannot reach the store.
        """
        # Forgotten first: if hosting fails, no closed store remains, and the next save connects again.
        old, self.host, self.joined = self.host, None, None
        if old is not None:
            old.close()
        if group.size > 1:
            self.host = host_store(group, timeout_s=timeout_s, host=self.options.coordinator_host)
        self.timeout_s = timeout_s
        self._send_join(self.writer, group.rank, group.size)
        self.joined = (group.rank, group.size)

    def make_room(self, prepared: PreparedSave) -> None:
        """Make the memory large enough for a save.

        Raises:
            StorageError: there is not enough memory.
            DeclarationError: the memory is bounded, and the format needs more at once.
        """
        needed = prepared.layout.stop
        self._wait_allocated()
        bound = self.options.staging_bytes
        if bound is None:
            # The bytes of pending saves are in this memory, so it can only grow when there are none.
            if needed > self.running().memory.nbytes:
                self.writer.wait_until(0)
            # The process may have been lost while this rank has waited for it, so it is looked up again.
            self.running().resize(max(needed, self.writer.memory.nbytes))
            return
        self.running().resize(bound)  # raises an error if the thread could not allocate it
        if not prepared.planned.strategy.capabilities.writes_in_order and needed > self.writer.memory.nbytes:
            raise DeclarationError(
                f"{needed:,} bytes are to be staged, and AsyncOptions.staging_bytes is {bound:,}. This "
                f"format writes the bytes of a rank in no fixed order, and needs all of them at once. Raise "
                f"staging_bytes, or choose a format that writes them in order: megackpt, or torch_dist with "
                f"thread_count=1."
            )

    def has_room_for(self, plan: SavePlan) -> bool:
        """Return whether all ranks have had room for a plan, one of the few that they used last."""
        return any(recent is plan for recent in self.plans_with_room)

    def wait_staged(self) -> None:
        """Return when nothing is being copied. Local."""
        _join(self.staging)
        self.staging = None

    def _wait_allocated(self) -> None:
        _join(self.allocation)
        self.allocation = None

    def failure(self) -> CheckpointError | None:
        """Return the error of the first save that has failed; log the errors of others that have ended."""
        ended = [job for job in self.jobs if job.is_over]
        self.jobs = [job for job in self.jobs if not job.is_over]
        errors = [job.error for job in ended if job.error is not None]
        if self.unraised is not None:
            errors.insert(0, self.unraised)
            self.unraised = None
        for error in errors[1:]:
            log.error("Another save has failed, too: %s", error)
        if errors:
            self.joined = None  # the store may have failed: the next save connects again
        return errors[0] if errors else None

    def status(self, group: Group, *, with_failure: bool) -> WriterStatus:
        """Return whether a save has failed on this rank, whether one is pending, whether to connect. Local.

        with_failure says whether `follow_status` is going to raise the error of a save that has failed.

        Raises:
            DeclarationError: this process was forked from the one that has the writer.
        """
        if not self.writer.is_ours:
            # Staging memory and the threads that talk to the writer are not in this process.
            raise DeclarationError(
                "This process was forked from the one that saves in the background, and has no writer of its "
                "own. Create another Checkpointer here, or save with async_save=False."
            )
        if with_failure:
            # If the collective fails, the error is neither raised nor lost: the next call sends it again.
            self.unraised = self.failure()
        is_busy = self.running().is_busy
        is_connected = self.joined == (group.rank, group.size)
        has_failed = with_failure and self.unraised is not None
        return dict(zip(WRITER_STATUS, (int(has_failed), int(is_busy), int(not is_connected)), strict=True))

    def follow_status(
        self,
        status: WriterStatus,
        group: Group,
        *,
        timeout_s: float,
        raised_in: AbstractContextManager[Any] | None,
    ) -> None:
        """Raise the error of a save that has failed, and connect the writers if needed. Collective.

        Args:
            status: the maximum over all ranks of the numbers that `status` has returned, by name.
            group: the ranks.
            timeout_s: how long writers wait for each other, in seconds.
            raised_in: a context in which the error is raised, and which may suppress it; None if `status` was
                called without failures.

        Raises:
            CheckpointError: the same on every rank, of the first rank that has one.
        """
        has_failed, is_apart = status["writer has failed"], status["writer is apart"]
        if has_failed and raised_in is not None:
            error, self.unraised = self.unraised, None
            # On ranks without an error, too: all ranks of the group have to connect together.
            self.joined = None
            # Only ranks whose save has failed have an error; all ranks raise that of the first one.
            errors = group.all_gather(encode_error(error) if error is not None else b"")
            with raised_in:
                raise decode_error(next(encoded for encoded in errors if encoded)) from error
        if has_failed or is_apart:
            self.connect(group, timeout_s=timeout_s)

    def end(self, *, keeps_writer: bool) -> None:
        """Wait for pending saves, and release all resources. An interrupted call can be repeated."""
        self.wait_staged()
        self._wait_allocated()
        for writer in _writers_of(self):
            writer.wait_until(0)
            if keeps_writer and not writer.is_lost:
                _return_writer(writer, self)
            else:
                _close_writer(writer)
        # After the wait: the last job of rank 0, which serves the store, is over when the writers of all
        # ranks have left their group.
        if self.host is not None:
            self.host.close()

    def _send_join(self, writer: WriterProcess, rank: int, size: int) -> None:
        """Send a process the rank that it writes for."""
        writer.join(rank=rank, size=size, host=self.host, timeout_s=self.timeout_s)


def end_forgotten(session: WriterSession) -> None:
    """End a session whose saver is garbage, and log the errors that were not raised."""
    if any(not writer.is_ours for writer in _writers_of(session)):
        return
    session.end(keeps_writer=False)
    for job in session.jobs:
        if job.error is not None:
            log.error("An asynchronous save has failed: %s", job.error)


def _join(thread: threading.Thread | None) -> None:
    """Wait until a thread has ended, if there is one and it was started."""
    if thread is not None and thread.ident is not None:
        thread.join()


def _allocate(writer: WriterProcess, nbytes: int) -> None:
    with contextlib.suppress(CheckpointError):  # the first save tries again, and raises the error
        writer.resize(nbytes)


_WRITERS: list[WriterProcess] = []
"""The processes that were started here and not closed. At most one of them is idle: it has no user."""

_LOCK = threading.Lock()  # for changes from and to idle


def _take_writer(session: WriterSession) -> WriterProcess:
    """Return a process that nobody else uses, with staging memory of size 0. Its user is this session."""
    options = session.options
    kind = options.nice, options.ionice, session.hook
    with _LOCK:
        idle = _writers_of(None)
        lost = [writer for writer in idle if writer.is_lost]
        writer = next((writer for writer in idle if writer.kind == kind and writer not in lost), None)
        for own in (*lost, *([] if writer is None else [writer])):
            own.user = session
    for ended in lost:  # without the lock: this waits for threads
        _close_writer(ended)
    if writer is None:
        writer = WriterProcess(options, memory=StagingMemory(), kind=kind, user=session)
        _WRITERS.append(writer)
        writer.begin()
    return writer


def _return_writer(writer: WriterProcess, session: WriterSession) -> None:
    """Keep a process that has nothing to do instead of an earlier one, which ends."""
    writer.rest()
    with _LOCK:
        earlier = _writers_of(None)
        for other in earlier:
            other.user = session
        writer.user = None
    for other in earlier:
        _close_writer(other)


def _close_writer(writer: WriterProcess) -> None:
    writer.close()
    with contextlib.suppress(ValueError):  # closed for the second time, since the first was interrupted
        _WRITERS.remove(writer)


def _writers_of(user: WriterSession | None) -> list[WriterProcess]:
    """Return the processes of a session; for None the idle ones, without those inherited by a fork."""
    # Of a copy: another thread may remove a process meanwhile.
    writers = [writer for writer in list(_WRITERS) if writer.user is user]
    return writers if user is not None else [writer for writer in writers if writer.is_ours]


@atexit.register
def _end_idle() -> None:
    for writer in _writers_of(None):
        _close_writer(writer)
