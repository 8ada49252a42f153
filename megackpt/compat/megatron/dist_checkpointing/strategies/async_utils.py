"""Requests and queues of asynchronous saves.

Here a strategy saves synchronously; asynchronous saves are a Checkpointer's. Requests are plain data, an
empty queue is one, and what would start a process refuses.

Source: Megatron-Core `dist_checkpointing.strategies.async_utils`, for names and signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from megackpt.compat.megatron.refusal import refuse, refused
from megackpt.errors import DeclarationError

_WHY = {
    "because": "its saves are synchronous.",
    "instead": "Leave async_sharded_save=False; for asynchronous saving use "
    "megackpt.Checkpointer(async_save=True).",
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
    """A queue of asynchronous saves, which stays empty: nothing can be scheduled in this version."""

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        refuse_async("AsyncCallsQueue.schedule_async_request")

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Return the numbers of requests that have ended: none."""
        return []

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests are under way: none."""
        return 0

    def close(self, abort: bool = False) -> None:
        """End the queue; there is nothing to end."""


def refuse_async(name: str) -> NoReturn:
    """Refuse to save asynchronously, which is what `name` does.

    Raises:
        UnsupportedError: always.
    """
    refuse(name, **_WHY)


AsyncCaller = refused("AsyncCaller", **_WHY)
TemporalAsyncCaller = refused("TemporalAsyncCaller", **_WHY)
PersistentAsyncCaller = refused("PersistentAsyncCaller", **_WHY)
DistributedAsyncCaller = refused("DistributedAsyncCaller", **_WHY)
