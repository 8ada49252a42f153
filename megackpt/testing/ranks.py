"""A pool of real worker ranks: processes that are started once and run many small distributed jobs.

Importing torch costs seconds, so a test session keeps one pool. Each job gets a new gloo process group of
the size that it asks for. A job that takes too long is an error, and its processes are replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megackpt.comm.child_processes import child_environment, without_current_directory

JOB_TIMEOUT_S = 120.0
_END_S = 5.0
_STACKS_S = 0.2  # for a rank that hangs, to write its stacks before the next one does


class JobFailedError(AssertionError):
    """A function run on the pool raised, died or did not end in time; the text has their tracebacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank's call ended in: a value, or an exception with its traceback as text.

    Attributes:
        rank: the rank of the call.
        value: what the function returned; None if it raised.
        error: the exception, or None. One that cannot be pickled arrives as a RuntimeError with its text.
        trace: the formatted traceback of `error`, or "".
    """

    rank: int
    value: Any  # whatever the caller's function returns
    error: BaseException | None
    trace: str


class RankPool:
    """Worker processes that run `fn(*args)` on n ranks of a fresh gloo group.

    >>> pool = RankPool()                                    # doctest: +SKIP
    >>> pool.run(torch.distributed.get_rank, 4)              # doctest: +SKIP
    [0, 1, 2, 3]

    `fn` must be importable (a module-level function) and its arguments picklable. In the workers
    `torch.distributed` is initialised for n ranks, one torch thread each.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        # A FileStore may be destroyed after its job. Its destructor opens the file if it exists, and waits
        # for minutes if the file is removed just then. So the files stay until all workers have ended.
        self._stores = tempfile.TemporaryDirectory(prefix="megackpt-ranks-")
        self._jobs = 0

    def run(
        self, fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = JOB_TIMEOUT_S
    ) -> list[Any]:
        """Return what `fn(*args)` returned on each rank, in rank order.

        Raises:
            JobFailedError: a rank raised, died or did not end within `timeout_s`. One that did not end has
                written the stacks of its threads to stderr.
        """
        outcomes = self.outcomes(fn, ranks, *args, timeout_s=timeout_s)
        failed = [o for o in outcomes if o.error is not None]
        if failed:
            report = "\n".join(f"--- rank {o.rank} of {ranks} ---\n{o.trace or o.error!r}" for o in failed)
            raise JobFailedError(f"{getattr(fn, '__qualname__', fn)} failed:\n{report}") from failed[0].error
        return [o.value for o in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = JOB_TIMEOUT_S
    ) -> list[Outcome]:
        """Like `run`, but errors are returned for inspection. A rank that died has an `EOFError`."""
        self._grow(ranks)
        self._jobs += 1
        store = str(Path(self._stores.name) / str(self._jobs))
        for rank in range(ranks):
            job = pickle.dumps((fn, args))
            self._workers[rank][1].send((list(sys.path), job, rank, ranks, store, timeout_s))
        return self._collect(ranks, timeout_s)

    def pids(self, ranks: int) -> list[int]:
        """Return the process ids that serve ranks 0 to `ranks - 1`, starting them if needed."""
        self._grow(ranks)
        return [process.pid or 0 for process, _ in self._workers[:ranks]]

    def close(self) -> None:
        """End all workers, and what they have started; kill those that have not ended after 5 s.

        The pool cannot be used again.
        """
        for _, connection in self._workers:
            connection.close()
        # A worker that is killed leaves its own children behind, such as servers of multiprocessing.
        deadline = time.monotonic() + _END_S
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
        for rank in range(len(self._workers)):
            self._end(rank)
        self._workers = []
        self._stores.cleanup()

    def _grow(self, ranks: int) -> None:
        for rank, (process, _) in enumerate(self._workers):
            if not process.is_alive():
                self._workers[rank] = _start_worker()
        while len(self._workers) < ranks:
            self._workers.append(_start_worker())

    def _collect(self, ranks: int, timeout_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < ranks:
            waiting = {self._workers[r][1]: r for r in range(ranks) if r not in outcomes}
            ready = [c for c in wait(list(waiting), timeout=timeout_s) if isinstance(c, Connection)]
            for connection in ready:
                outcomes[waiting[connection]] = self._receive(connection, waiting[connection])
            if not ready:
                self._show_stacks(waiting.values())
                for rank in waiting.values():
                    self._end(rank)
                    error = TimeoutError(f"rank {rank} did not end within {timeout_s} s and was killed")
                    outcomes[rank] = Outcome(rank=rank, value=None, error=error, trace="")
        return [outcomes[r] for r in range(ranks)]

    def _show_stacks(self, ranks: Iterable[int]) -> None:
        """Let ranks that hang write to stderr what each of their threads does."""
        for rank in ranks:
            process, _ = self._workers[rank]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGQUIT)
                time.sleep(_STACKS_S)

    def _receive(self, connection: Connection, rank: int) -> Outcome:
        try:
            value, error, trace = connection.recv()
        except (EOFError, ConnectionResetError):
            self._end(rank)
            value, error, trace = None, EOFError(f"the process of rank {rank} died"), ""
        return Outcome(rank=rank, value=value, error=error, trace=trace)

    def _end(self, rank: int) -> None:
        process, connection = self._workers[rank]
        connection.close()
        process.kill()
        process.join()


def _start_worker() -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")  # never fork: the parent may hold threads and locks of torch
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with child_environment("OMP_NUM_THREADS", "1"), without_current_directory():
        process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    import torch

    os.environ.pop(
        "PYTHONSAFEPATH", None
    )  # it was for the start of this process, not for those that it starts
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGQUIT)
    gc.freeze()  # what is imported is never garbage; so each collection looks at the jobs' objects alone
    while True:
        try:
            search_path, job, rank, ranks, store_file, timeout_s = connection.recv()
        except EOFError:
            return
        sys.path[:] = search_path
        try:
            answer: tuple[Any, BaseException | None, str] = (
                _call(job, rank, ranks, store_file, timeout_s),
                None,
                "",
            )
        except BaseException as error:  # noqa: BLE001 - the last line of a worker: the error is handed over
            answer = (None, error, traceback.format_exc())
        connection.send_bytes(_pickled(answer))
        del answer, job
        # Groups of torch that a model or a traceback in a cycle refers to live on, and each has a thread of
        # gloo that wakes a hundred times a second. Hundreds of them would take the processors' time.
        gc.collect()


def _call(job: bytes, rank: int, ranks: int, store_file: str, timeout_s: float) -> Any:
    import torch.distributed as dist

    fn, args = pickle.loads(job)  # comes from our own parent through a pipe
    store = dist.FileStore(store_file, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
    )
    try:
        return fn(*args)
    finally:
        if _torch_version() < (2, 8):
            # There gloo's destructor waits for its threads with the interpreter locked (pytorch#154976): let
            # them finish the last collective before it is called.
            time.sleep(0.05)
        with contextlib.suppress(Exception):  # after a failed job the group may be broken already
            dist.destroy_process_group()


def _torch_version() -> tuple[int, ...]:
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _pickled(answer: tuple[Any, BaseException | None, str]) -> bytes:
    value, error, trace = answer
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except Exception as reason:  # noqa: BLE001 - anything may go wrong in a stranger's __reduce__
        text = (
            f"{error!r}" if error is not None else f"the result {type(value)} cannot be pickled: {reason!r}"
        )
        data = pickle.dumps((None, RuntimeError(text), trace))
    return data
