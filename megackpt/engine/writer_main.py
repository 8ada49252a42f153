"""A writer process: writes and commits what its rank has staged, one save after the other.

Owns what happens in that process: `python -m megackpt.engine.writer_main SETTINGS`. It lives as long as the
training process that started it, and no longer: else it could commit when a restarted job already writes.
It uses no CUDA, and runs nothing of the user's script.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from megackpt.comm import (
    Group,
    Numbers,
    SingleProcess,
    StoreGroup,
    compare,
    connect_store,
    decode_error,
    encode_error,
)
from megackpt.comm.group import common_error
from megackpt.engine.agree_on_plan import Completes
from megackpt.engine.arena import Layout, Octets, lay_out, map_memory, stretches
from megackpt.engine.signs_of_life import BEAT_S, Pulse
from megackpt.engine.verify import find_damages
from megackpt.engine.verify_together import after_commit, verify_together
from megackpt.engine.write import Planned, write_out
from megackpt.engine.writer_messages import (
    Cancelled,
    Committed,
    Consumed,
    Ended,
    Followed,
    ForgetPlan,
    FromWriter,
    Job,
    Join,
    Leave,
    Ready,
    Staged,
    ToWriter,
    UseArena,
    UsePlan,
    meetings_of,
)
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import VerifyOptions
from megackpt.planning import SavePlan, with_object_sizes
from megackpt.storage import Store

_WORKER = "megackpt-writer"  # the thread that does the jobs
_VIEW_BYTES = 8 << 20  # memory of a stream is given back in such steps
_IO_CLASSES = {"low": (2, 7), "idle": (3, 0)}  # class and level; Source: ioprio_set(2)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}

Hook = Callable[[Store], Store]
"""What tests put around the store of each save; it is named by module and attribute, `a.b:c`."""


class Stream:
    """How far the stream of this rank is there, and how far it was used. Safe for several threads."""

    def __init__(self, tell: Callable[[FromWriter], None], pulse: Pulse) -> None:
        self._tell = tell
        self._pulse = pulse
        self._news = threading.Condition()
        self._staged = 0
        self._consumed = 0
        self._cancelled: dict[int, bytes] = {}

    def stage(self, position: int) -> None:
        """Note that the stream is there up to a position."""
        with self._news:
            self._staged = max(self._staged, position)
            self._news.notify_all()

    def cancel(self, job: int, error: bytes) -> None:
        """Note that the part of a job will never be there."""
        with self._news:
            self._cancelled[job] = error
            self._news.notify_all()

    def wait(self, position: int, *, job: int) -> None:
        """Return when the stream is there up to a position.

        Raises:
            CheckpointError: why it will never be.
        """
        self._pulse.beat()
        with self._news:
            while not self._news.wait_for(
                lambda: self._staged >= position or job in self._cancelled, timeout=BEAT_S
            ):
                self._pulse.beat()  # the training takes its time
            if job in self._cancelled:
                raise decode_error(self._cancelled[job])

    def consume(self, position: int, *, step: int = 0) -> None:
        """Let the memory before a position be used again; said if it is as much as step."""
        with self._news:
            if position - self._consumed < max(step, 1):
                return
            self._consumed = position
        self._tell(Consumed(position))


class StreamPieces:
    """The bytes of rows that come through a stream; see `Pieces` and `InOrder`."""

    def __init__(self, stream: Stream, memory: Octets, rows: Sequence[int], layout: Layout, job: Job) -> None:
        self._stream, self._memory, self._job = stream, memory, job
        starts = (layout.start + job.start).tolist()
        self._span = dict(zip(rows, zip(starts, layout.nbytes.tolist(), strict=True), strict=True))

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Return the bytes of one row."""
        start, nbytes = self._span[int(row)]
        capacity, in_order = self._memory.size, self._job.in_order
        # A quarter: of what is consumed up to a sixteenth is not said yet, so not all of it is free.
        step = min(_VIEW_BYTES, capacity // 4) if in_order else max(nbytes, 1)
        for low in range(start, start + nbytes, step):
            high = min(low + step, start + nbytes)
            for first, last in stretches(low, high, capacity=capacity):
                self._stream.wait(low + last - first, job=self._job.number)
                yield self._memory.data[first:last]
                low += last - first
                if in_order:
                    self._stream.consume(low, step=capacity // 16)

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each row."""
        return map(self, rows)


class Writer:
    """Does the jobs of one rank, in a thread; messages are taken by another."""

    def __init__(self, connection: Connection, arena: int, hook: Hook | None) -> None:
        self._connection, self._arena, self._hook = connection, arena, hook
        self._sending = threading.Lock()
        self._pulse = Pulse(self._send)
        self._stream = Stream(self._send, self._pulse)
        self._memory: Octets = map_memory(arena, 0, writable=False)
        self._plans: dict[int, UsePlan] = {}
        self._todo: queue.SimpleQueue[Join | tuple[Job, UsePlan, Octets]] = queue.SimpleQueue()
        self._followed: queue.SimpleQueue[Followed] = queue.SimpleQueue()
        self._join = Join(rank=0, size=1, address=None, timeout_s=0)
        self._store: Any = None  # a dist.Store

    def run(self) -> None:
        """Take messages until there are no more."""
        threading.Thread(target=self._work, name=_WORKER, daemon=True).start()
        self._send(Ready())
        with contextlib.suppress(EOFError, ConnectionError):
            while not isinstance(message := self._connection.recv(), Leave):
                self._take(message)

    def _take(self, message: ToWriter) -> None:
        match message:
            case Staged():
                self._stream.stage(message.position)
            case Cancelled():
                self._stream.cancel(message.job, message.error)
            case Followed():
                self._followed.put(message)
            case UseArena():
                self._memory = map_memory(self._arena, message.nbytes, writable=False)
            case UsePlan():
                self._plans[message.number] = message
            case ForgetPlan():
                del self._plans[message.number]
            case Join():
                self._todo.put(message)
            case Job():
                self._todo.put((message, self._plans[message.plan], self._memory))

    def _work(self) -> None:
        while True:
            todo = self._todo.get()
            if isinstance(todo, Join):
                self._join, self._store = todo, None
                continue
            job, plan, memory = todo
            plan_now = with_object_sizes(plan.plan, job.sizes)
            rows = plan_now.rows_of(self._join.rank)
            layout = lay_out(plan_now.table.nbytes[rows])
            error: bytes | None = None
            try:
                pieces = StreamPieces(self._stream, memory, rows.tolist(), layout, job)
                self._do(job, plan_now, plan.complete, pieces)
            except CheckpointError as raised:
                if type(raised) is RankFailedError and raised.__cause__ is not None:
                    traceback.print_exc()  # none of ours: the rank will not have where it came from
                error = encode_error(raised)
            except Exception as raised:  # noqa: BLE001 - handed over to the rank, which raises it
                traceback.print_exc()
                failures = {self._join.rank: encode_error(raised)}
                error = encode_error(common_error(failures, f"saving {job.label}"))
            self._stream.consume(job.start + layout.stop)
            self._send(Ended(job.number, error))

    def _do(self, job: Job, plan: SavePlan, complete: Completes | None, pieces: StreamPieces) -> None:
        group = self._group(job)
        opened: list[tuple[Store, SaveStrategy]] = []

        def prepare() -> Numbers:
            store = job.place.open()
            opened.append((self._hook(store) if self._hook else store, _unpickled(job.strategy)))
            return Numbers(())

        damages: list[Damage] | None = None

        def follow() -> Numbers:
            if group.rank == 0:
                self._send(Committed(job.number, None if damages is None else tuple(damages)))
                told = self._followed.get()
                if told.error is not None:
                    raise decode_error(told.error)
            return Numbers(())

        try:
            compare(group, prepare, alike=0, doing="preparing to write")
            store, strategy = opened[0]
            planned = Planned(
                attempt=job.attempt,
                plan=plan,
                pieces=pieces,
                common=job.common,
                earlier=None,
                report=job.report,
                parity=job.parity,
                complete=complete,
            )
            try:
                write_out(planned, store, strategy, group)
                if job.verify is not None:
                    damages = self._verify(store, job.verify, group)
            finally:
                store.close()
            compare(group, follow, alike=0, doing=after_commit(damages))
        finally:
            if isinstance(group, StoreGroup):
                group.leave()

    def _verify(self, store: Store, options: VerifyOptions, group: Group) -> list[Damage]:
        # Classes that the training has registered, or allows in pickles, are not known in this process.
        known_here = replace(options, allow_unsafe_pickle=False, skip_unknown_classes=True)
        look = partial(find_damages, store, known_here)
        timeout_s = self._join.timeout_s
        return verify_together(group, look, timeout_s=timeout_s, while_reading=self._pulse.beat)

    def _group(self, job: Job) -> Group:
        to = self._join
        if to.address is None:
            return SingleProcess()
        if self._store is None:
            try:
                self._store = connect_store(to.address, timeout_s=to.timeout_s)
            except RankFailedError as error:  # its rank has reached it, so it was lost since
                raise WriterFailedError(error.message, rank=error.rank) from error
        return StoreGroup(
            self._store,
            prefix=meetings_of(job.attempt),
            rank=to.rank,
            size=to.size,
            timeout_s=to.timeout_s,
            while_waiting=self._pulse.beat,
        )

    def _send(self, message: FromWriter) -> None:
        with self._sending:
            self._connection.send(message)


def _unpickled(strategy: bytes) -> SaveStrategy:
    found: SaveStrategy = ForkingPickler.loads(strategy)  # of our own parent, through a pipe
    return found


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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
