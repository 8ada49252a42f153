"""A writer process: writes and commits what its rank has staged, one save after the other.

Owns that process, which `start` starts, and the messages to and from its rank; what it does for a save is in
`jobs`. It lives as long as the training process that started it, and no longer: else it could commit when a
restarted job already writes. It uses no CUDA, and runs nothing of the user's script.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from megackpt.comm import Group, SingleProcess
from megackpt.comm.messages import decode_error, encode_error
from megackpt.comm.store_group import StoreGroup, connect_store
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.heartbeat import Heartbeat
from megackpt.engine.background.jobs import Hook, carry_out, failure_of, planned_by
from megackpt.engine.background.messages import (
    CancelledMessage,
    CommittedMessage,
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
    meetings_of,
)
from megackpt.engine.background.staging_memory import ByteArray, lay_out_rows, map_memory
from megackpt.engine.background.stream import StagedStream, StreamRowParts
from megackpt.engine.saving.write import PlannedSave
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.formats.damage import Damage
from megackpt.planning import with_object_sizes
from megackpt.storage import Store

_WORKER = "megackpt-writer"  # the thread that does the jobs
_IO_CLASSES = {"low": (2, 7), "idle": (3, 0)}  # class and level; Source: ioprio_set(2)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


class Writer:
    """Does the jobs of one rank, in a thread; messages are taken by another."""

    def __init__(self, connection: Connection, arena: int, hook: Hook | None) -> None:
        self._connection, self._arena, self._hook = connection, arena, hook
        self._sending = threading.Lock()
        self._pulse = Heartbeat(self._send)
        self._stream = StagedStream(self._send, self._pulse)
        self._memory: ByteArray | None = None  # mapped when there is a job
        self._memory_nbytes = 0
        self._plans: dict[int, PlanMessage] = {}
        self._todo: queue.SimpleQueue[JoinMessage | tuple[Job, PlanMessage, ByteArray]] = queue.SimpleQueue()
        self._followed: queue.SimpleQueue[FollowUpDoneMessage] = queue.SimpleQueue()
        self._join = JoinMessage(rank=0, size=1, address=None, timeout_s=0)
        self._store: Any = None  # a dist.Store

    def run(self) -> None:
        """Take messages until there are no more."""
        threading.Thread(target=self._work, name=_WORKER, daemon=True).start()
        self._send(ReadyMessage())
        with contextlib.suppress(EOFError, ConnectionError):
            while not isinstance(message := self._connection.recv(), LeaveMessage):
                self._take(message)

    def _take(self, message: ToWriter) -> None:
        match message:
            case StagedMessage():
                self._stream.stage(message.position)
            case CancelledMessage():
                self._stream.cancel(message.job, message.error)
            case FollowUpDoneMessage():
                self._followed.put(message)
            case MemoryMessage():
                self._memory, self._memory_nbytes = None, message.nbytes
            case PlanMessage():
                self._plans[message.number] = message
            case ForgetPlanMessage():
                del self._plans[message.number]
            case JoinMessage():
                self._todo.put(message)
            case Job():
                self._todo.put((message, self._plans[message.plan], self._mapped()))

    def _mapped(self) -> ByteArray:
        """Return the memory. It has one size as long as there is a job; between jobs it may be made anew."""
        if self._memory is None:
            self._memory = map_memory(self._arena, self._memory_nbytes, writable=False)
        return self._memory

    def _work(self) -> None:
        while True:
            todo = self._todo.get()
            if isinstance(todo, JoinMessage):
                self._join, self._store = todo, None
                continue
            job, plan, memory = todo
            plan_now = with_object_sizes(plan.plan, job.sizes)
            rows = plan_now.rows_of(self._join.rank)
            layout = lay_out_rows(plan_now.table.nbytes[rows])
            error: bytes | None = None
            try:
                pieces = StreamRowParts(self._stream, memory, rows.tolist(), layout, job)
                self._do(job, planned_by(job, plan_now, plan.complete, pieces))
            except CheckpointError as raised:
                if type(raised) is RankFailedError and raised.__cause__ is not None:
                    traceback.print_exc()  # none of ours: the rank will not have where it came from
                error = encode_error(raised)
            except Exception as raised:  # noqa: BLE001 - handed over to the rank, which raises it
                traceback.print_exc()
                error = encode_error(failure_of(job, raised, rank=self._join.rank))
            if not job.keeps or self._stream.is_cancelled(job.number):
                self._stream.consume(job.start + layout.stop)
            self._send(EndedMessage(job.number, error))

    def _do(self, job: Job, planned: PlannedSave) -> None:
        group = self._group(job)
        try:
            carry_out(job, planned, group, self)
        finally:
            if isinstance(group, StoreGroup):
                group.leave()

    def open(self, job: Job) -> Store:
        """Return the store that a job is written to."""
        store = job.place.open()
        return self._hook(store) if self._hook else store

    def follow(self, job: Job, damages: Sequence[Damage] | None) -> None:
        """Let the training do what follows a commit, and wait until that is done.

        Raises:
            CheckpointError: what that has raised.
        """
        self._send(CommittedMessage(job.number, None if damages is None else tuple(damages)))
        told = self._followed.get()
        if told.error is not None:
            raise decode_error(told.error)

    def beat(self) -> None:
        """Show that this process works."""
        self._pulse.beat()

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other, in seconds."""
        return self._join.timeout_s

    def _group(self, job: Job) -> Group:
        to = self._join
        if to.address is None:
            return SingleProcess()
        if self._store is None:
            try:
                self._store = connect_store(to.address, timeout_s=to.timeout_s)
            except RankFailedError as error:  # its rank has reached it, so it was lost since
                raise WriterFailedError(error.message, rank=error.rank) from error
        prefix, timeout_s, beat = meetings_of(job.attempt), to.timeout_s, self.beat
        if isinstance(job.place, NodeLocation):  # files go from node to node
            return WriterGroup(
                self._store,
                address=to.address,
                prefix=prefix,
                rank=to.rank,
                size=to.size,
                timeout_s=timeout_s,
                while_waiting=beat,
            )
        return StoreGroup(
            self._store, prefix=prefix, rank=to.rank, size=to.size, timeout_s=timeout_s, while_waiting=beat
        )

    def _send(self, message: FromWriter) -> None:
        with self._sending:
            self._connection.send(message)


def main(settings: dict[str, Any]) -> None:
    """Run a writer process.

    settings: `connection` and `arena`, descriptors; `parent`, process id; `nice`; `ionice`; `hook`.
    """
    _end_with(settings["parent"])
    threading.excepthook = _end_with_worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training, which decides what becomes of a save
    torch.set_num_threads(1)
    _stand_back(settings["nice"], settings["ionice"])
    hook = _imported(settings["hook"]) if settings["hook"] else None
    Writer(Connection(settings["connection"]), settings["arena"], hook).run()
    os._exit(0)  # whatever is under way is not to be finished


def _end_with_worker(args: threading.ExceptHookArgs) -> None:
    """End this process if the thread that does the jobs has ended, by sys.exit() in a strategy, say."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    if args.thread is not None and args.thread.name == _WORKER:
        os._exit(1)


def _end_with(parent: int) -> None:
    """End this process at once when its parent has ended."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # in kernels that lack it
            descriptor = os.pidfd_open(parent)
            threading.Thread(target=_exit_at_end_of, args=(descriptor,), daemon=True).start()
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()


def _exit_at_end_of(process: int) -> None:
    waiting = select.poll()  # a select takes no descriptor above 1024
    waiting.register(process, select.POLLIN)
    waiting.poll()
    os._exit(1)


def _exit_without(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os._exit(1)


def _stand_back(nice: int, ionice: str | None) -> None:
    """Let others have processors and disks first, as far as the system lets one."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    number = _IOPRIO_SET.get(platform.machine())
    if ionice is not None and number is not None and sys.platform == "linux":
        kind, level = _IO_CLASSES[ionice]
        ctypes.CDLL(None).syscall(number, 1, 0, kind << 13 | level)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
