"""The main program of a writer process, which writes and commits the saves that its rank has staged.

The process ends with the training process that has started it: otherwise it could commit a save while a
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
from multiprocessing.connection import Connection
from typing import Any

import torch

from megackpt.comm import Group, SingleProcess
from megackpt.comm.group import encode_error
from megackpt.comm.store_group import StoreGroup
from megackpt.comm.store_host import connect_store
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.jobs import StagedJob, StoreHook, carry_out, failure_of
from megackpt.engine.background.messages import (
    CancelledMessage,
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
from megackpt.engine.background.staging_memory import lay_out_rows, map_memory
from megackpt.engine.background.trainer_connection import StagedStream, StreamRowParts, TrainerConnection
from megackpt.engine.data.device_copies import ByteArray
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.plans.planning import with_object_sizes

_WORKER = "megackpt-writer"  # the thread that does the jobs
_IO_CLASSES = {"low": (2, 7), "idle": (3, 0)}  # class and level; Source: ioprio_set(2)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


class Writer:
    """Does the jobs of one rank in a thread; another thread, which calls `run`, receives messages."""

    def __init__(self, connection: Connection, memory: int, hook: StoreHook | None) -> None:
        self._trainer = TrainerConnection(connection)
        self._descriptor, self._hook = memory, hook
        self._stream = StagedStream(self._trainer.send, self._trainer.heartbeat)
        self._memory: ByteArray | None = None  # mapped when there is a job
        self._memory_nbytes = 0
        self._plans: dict[int, PlanMessage] = {}
        self._todo: queue.SimpleQueue[JoinMessage | tuple[Job, PlanMessage, ByteArray]] = queue.SimpleQueue()
        self._join = JoinMessage(rank=0, size=1, address=None, timeout_s=0)
        self._store: Any = None  # a dist.Store

    def run(self) -> None:
        """Receive messages until there are no more."""
        # A job needs messages while it runs: positions that are staged, and the end of the work after its
        # commit.
        threading.Thread(target=self._work, name=_WORKER, daemon=True).start()
        self._trainer.send(ReadyMessage())
        with contextlib.suppress(EOFError, ConnectionError):
            while not isinstance(message := self._trainer.receive(), LeaveMessage):
                self._take(message)

    def _take(self, message: ToWriter) -> None:
        match message:
            case StagedMessage():
                self._stream.stage(message.position)
            case CancelledMessage():
                self._stream.cancel(message.job, message.error)
            case FollowUpDoneMessage():
                self._trainer.note_follow_up(message)
            case MemoryMessage():
                self._memory, self._memory_nbytes = None, message.nbytes
            case PlanMessage():
                self._plans[message.number] = message
            case ForgetPlanMessage():
                del self._plans[message.number]
            case JoinMessage():
                # In the queue of jobs: those before it belong to the former rank and store.
                self._todo.put(message)
            case Job():
                # Looked up in the order of the messages: when the job begins, its plan may be forgotten
                # already.
                self._todo.put((message, self._plans[message.plan], self._mapped()))

    def _mapped(self) -> ByteArray:
        """Return the staging memory, mapped. Its size changes only while no job is pending."""
        if self._memory is None:
            self._memory = map_memory(self._descriptor, self._memory_nbytes, writable=False)
        return self._memory

    def _work(self) -> None:
        while True:
            todo = self._todo.get()
            if isinstance(todo, JoinMessage):
                # The address may be another one, so the next job connects again.
                self._join, self._store = todo, None
            else:
                self._do(*todo)

    def _do(self, job: Job, plan_message: PlanMessage, memory: ByteArray) -> None:
        """Do a job, free its memory and send its outcome."""
        plan, rank = plan_message.plan, self._join.rank
        sized = plan if job.object_sizes is None else with_object_sizes(plan, {rank: job.object_sizes})
        rows = sized.rows_of(rank)
        layout = lay_out_rows(sized.table.nbytes[rows])
        parts = StreamRowParts(self._stream, memory, rows.tolist(), layout, job)
        staged = StagedJob(job=job, plan=plan, parts=parts)
        error: bytes | None = None
        try:
            self._carry_out(staged)
        except CheckpointError as raised:
            if type(raised) is RankFailedError and raised.__cause__ is not None:
                traceback.print_exc()  # an error of another class: its traceback is lost when it is sent
            error = encode_error(raised)
        except Exception as raised:  # noqa: BLE001 - sent to the rank, which raises it
            traceback.print_exc()
            error = encode_error(failure_of(job, raised, rank=self._join.rank))
        # The bytes of a job that keeps them are freed by the last job that reads them.
        if not job.keeps or self._stream.is_cancelled(job.number):
            self._stream.consume(job.start + layout.stop)
        self._trainer.send(EndedMessage(job.number, error))

    def _carry_out(self, staged: StagedJob) -> None:
        group = self._group(staged.job)
        try:
            carry_out(staged, group, self._trainer, hook=self._hook, timeout_s=self._join.timeout_s)
        finally:
            # After an error, too: the writer of rank 0 waits for all ranks before it removes their messages.
            if isinstance(group, StoreGroup):
                group.leave()

    def _group(self, job: Job) -> Group:
        join = self._join
        if join.address is None:
            return SingleProcess()
        if self._store is None:
            try:
                self._store = connect_store(join.address, timeout_s=join.timeout_s)
            except RankFailedError as error:  # its rank reached the store before: it was lost since
                raise WriterFailedError(error.message, rank=error.rank) from error
        prefix, beat = store_prefix(job.attempt), self._trainer.heartbeat.beat
        if isinstance(job.location, NodeLocation):  # files are sent from node to node
            return WriterGroup(
                self._store,
                address=join.address,
                prefix=prefix,
                rank=join.rank,
                size=join.size,
                timeout_s=join.timeout_s,
                while_waiting=beat,
            )
        return StoreGroup(
            self._store,
            prefix=prefix,
            rank=join.rank,
            size=join.size,
            timeout_s=join.timeout_s,
            while_waiting=beat,
        )


def main(settings: dict[str, Any]) -> None:
    """Run a writer process.

    Args:
        settings: `connection` and `memory`, descriptors; `parent`, process id; `nice`; `ionice`; `hook`.
    """
    # Before anything that may hang or fail, such as an import: the process must never run without its parent.
    _end_with(settings["parent"])
    threading.excepthook = _end_with_worker
    # These signals are for the training process, which decides about the save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The processors are for the training.
    torch.set_num_threads(1)
    _lower_priority(settings["nice"], settings["ionice"])
    hook = _import_attribute(settings["hook"]) if settings["hook"] else None
    Writer(Connection(settings["connection"]), settings["memory"], hook).run()
    os._exit(0)  # pending saves must not be finished


def _end_with_worker(args: threading.ExceptHookArgs) -> None:
    """End this process if the thread that does the jobs has ended, such as by sys.exit() in a strategy."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    if args.thread is not None and args.thread.name == _WORKER:
        os._exit(1)


def _end_with(parent: int) -> None:
    """End this process at once when its parent has ended."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # in kernels that lack it
            descriptor = os.pidfd_open(parent)
            threading.Thread(target=_exit_at_end_of, args=(descriptor,), daemon=True).start()
    # In any case: if the parent has ended before the descriptor was opened, its id may be that of another
    # process.
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()


def _exit_at_end_of(process: int) -> None:
    waiting = select.poll()  # `select.select` takes no descriptors above 1024
    waiting.register(process, select.POLLIN)
    waiting.poll()
    os._exit(1)


def _exit_without(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os._exit(1)


def _lower_priority(nice: int, ionice: str | None) -> None:
    """Lower the priority of this process for processors and disks, as far as the system allows it."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    number = _IOPRIO_SET.get(platform.machine())
    if ionice is not None and number is not None and sys.platform == "linux":
        kind, level = _IO_CLASSES[ionice]
        ctypes.CDLL(None).syscall(number, 1, 0, kind << 13 | level)


def _import_attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
