"""Requests and queues of asynchronous saves.

Requests end in the same order on all ranks. The engine's writer processes save; classes
that start processes in Megatron-Core raise an error.

Source: Megatron-Core `dist_checkpointing.strategies.async_utils`, for names and signatures.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megackpt.comm import Group, compare_step, world_group
from megackpt.contrib.megatron.deferred_save import DeferredSave
from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.engine.background.saver import AsyncSaver
from megackpt.entities import ShardedBase
from megackpt.errors import DeclarationError
from megackpt.options import AsyncOptions

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0  # as in SaveOptions
_WHY = {
    "because": "a writer process of each rank writes; the queue starts it.",
    "instead": "Use AsyncCallsQueue, or megackpt.Checkpointer(async_save=True).",
}


class AsyncRequest(NamedTuple):
    """What is to be done later, and what after that.

    Attributes:
        async_fn: does the work; None for none.
        async_fn_args: its arguments.
        finalize_fns: called in order when all ranks have done the work.
        async_fn_kwargs: keyword arguments of async_fn.
        preload_fn: stages the second argument of async_fn, in its place, before the call.
        is_frozen: no finalize function may be added any more.
        call_idx: number of the request in its queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[..., Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - a default of Megatron-Core's, and never changed here
    preload_fn: Callable[..., Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[..., Any]) -> None:
        """Add a function to be called last.

        Raises:
            DeclarationError: the request is frozen.
        """
        if self.is_frozen:
            raise DeclarationError(
                "A frozen AsyncRequest takes no more finalize functions. Add them before freeze()."
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do it all now, and wait for all ranks between the work and the finalize functions. Collective."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Return a copy that takes no more finalize functions."""
        return self._replace(is_frozen=True)


class AsyncCallsQueue:
    """Requests that are under way, and what is to be done after them, in order.

    Saves of ours go to a writer process of each rank, which is started with the first and kept, whatever
    persistent says. Any other function is called in a thread, one after the other. Tensors in its arguments
    are copied before, as a process of its own would not see them change; what a function reaches otherwise
    is staged by preload_fn, or by whoever makes the request.

    Source: Megatron-Core `AsyncCallsQueue`.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self._calls: deque[_Call] = deque()
        self._number = -1
        self._saver: AsyncSaver | None = None
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    def warmup_persistent_caller(
        cls, rank: int, mp_mode: str = "spawn", cpu_priority: int = 10, io_priority: int | None = None
    ) -> None:
        """Do nothing: the first save of a queue starts its writer process, by megackpt's own rules."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin a request; return its number. Collective.

        A save is planned and staged before this returns: then the state may change. One that is under way is
        waited for.

        Raises:
            CheckpointError: as `megackpt.save` before anything is written; or an earlier save has failed,
                whose request is then no longer in the queue. Nothing is begun.
        """
        request, group = async_request.freeze(), world_group(timeout_s=_TIMEOUT_S)
        if isinstance(request.async_fn, DeferredSave):
            self._await_earlier(request.async_fn, group)
            request.async_fn.begin(self._writer(), group)
            call = _Call(self._number + 1, request, None)
        else:
            call = _Call(self._number + 1, request, self._in_thread(request))
        self._number += 1
        self._calls.append(call)
        return call.number

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Call the finalize functions of requests that have ended on all ranks; return their numbers.

        Collective, unless no_dist is set, which looks at this rank alone. blocking waits for all requests.

        Raises:
            CheckpointError: the first of them has failed on a rank. It is no longer in the queue, and its
                finalize functions are not called.
        """
        ended: list[int] = []
        while self._calls and self._has_ended(self._calls[0], blocking, no_dist):
            call = self._calls.popleft()
            for finalize in call.request.finalize_fns:
                finalize()
            ended.append(call.number)
        return ended

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests are in the queue. Local."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests and end the queue; with abort, drop them uncommitted.

        Collective without abort.

        Raises:
            CheckpointError: as `maybe_finalize_async_calls`.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._calls.clear()
            saver, self._saver = self._saver, None
            threads, self._threads = self._threads, None
            if threads is not None:
                threads.shutdown(wait=not abort, cancel_futures=True)
            if saver is not None and abort:
                saver.abandon()
            elif saver is not None:
                saver.close()

    def _await_earlier(self, save: DeferredSave, group: Group) -> None:
        """Return when the save that is under way, if any, is committed; one that failed leaves the queue."""
        try:
            self._writer().may_save(group, save.options)
        except Exception:
            saves = [call for call in self._calls if call.future is None]
            if saves:  # those before it had succeeded when it was begun
                self._calls.remove(saves[-1])
            raise

    def _has_ended(self, call: _Call, blocking: bool, no_dist: bool) -> bool:
        try:
            if no_dist:
                return self._is_over(call, blocking)
            group = world_group(timeout_s=_TIMEOUT_S)
            doing = "looking after asynchronous saves"
            with compare_step(group, doing, equal=("number",), largest=("is under way",)) as step:
                step.equal["number"] = call.number
                step.largest["is under way"] = int(not self._is_over(call, blocking))
        except Exception:
            self._calls.remove(call)
            raise
        if not step.is_equal["number"]:
            raise DeclarationError(
                f"Ranks have different requests in their queues; this one is at number {call.number}. "
                f"Schedule and finalize in the same order on all ranks."
            )
        return not step.maximum["is under way"]

    def _is_over(self, call: _Call, blocking: bool) -> bool:
        """Return whether a request has ended here; raise its error. Local."""
        if call.future is not None:
            if not blocking and not call.future.done():
                return False
            call.future.result()
            return True
        assert self._saver is not None
        is_last = not any(later.future is None for later in self._calls if later.number > call.number)
        if not is_last:  # the next one was begun after it had ended
            return True
        if blocking:
            self._saver.wait()
        if self._saver.is_busy:  # its error is raised when it is over
            return False
        self._saver.poll()
        return True

    def _writer(self) -> AsyncSaver:
        if self._saver is None:
            self._saver = AsyncSaver(AsyncOptions())
        return self._saver

    def _in_thread(self, request: AsyncRequest) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="megackpt-async-call")
        args = list(request.async_fn_args)
        if request.preload_fn is not None:
            args[1] = None
        args, kwargs, work = _copied((args, request.async_fn_kwargs, request.async_fn or _nothing))
        if request.preload_fn is not None:
            args[1] = request.preload_fn()
        return self._threads.submit(work, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request in a queue; future is None for a save of ours."""

    number: int
    request: AsyncRequest
    future: Future[None] | None


def _nothing(*args: object, **kwargs: object) -> None:
    """Do the work of a request that has none."""


@contextlib.contextmanager
def _disable_gc() -> Iterator[None]:
    """Switch Python's garbage collector off for the time of the block. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _set_process_qos(cpu_priority: int | None, io_priority: int | None) -> None:
    """Lower the priority of the calling process; what the system does not allow is logged.

    cpu_priority is a nice value from 0 to 19, which is never lowered; io_priority a class of `ionice`, 3 for
    idle. None leaves either as it is.
    """
    try:
        if cpu_priority is not None and 0 <= cpu_priority <= 19:
            os.nice(max(0, cpu_priority - os.nice(0)))
        ionice = shutil.which("ionice") if io_priority is not None else None
        if ionice is not None:
            command = [ionice, "-c", str(io_priority), "-p", str(os.getpid())]
            subprocess.run(command, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("The priority of process %d was not lowered: %s", os.getpid(), error)


def _copied(value: Any) -> Any:
    """Return a value with copies of its tensors: in dicts, lists, tuples, entities and partial functions."""
    match value:
        case torch.Tensor():
            return value.detach().clone()
        case ShardedBase():
            copied = copy.copy(value)
            copied.data = _copied(copied.data)
            return copied
        case dict():
            return {key: _copied(inner) for key, inner in value.items()}
        case list():
            return [_copied(inner) for inner in value]
        case tuple():
            parts = [_copied(inner) for inner in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        case partial():
            return partial(_copied(value.func), *_copied(value.args), **_copied(value.keywords))
    return value


AsyncCaller = unsupported_name("AsyncCaller", **_WHY)
TemporalAsyncCaller = unsupported_name("TemporalAsyncCaller", **_WHY)
PersistentAsyncCaller = unsupported_name("PersistentAsyncCaller", **_WHY)
DistributedAsyncCaller = unsupported_name("DistributedAsyncCaller", **_WHY)
