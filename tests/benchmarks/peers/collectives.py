"""Count the collectives that this process begins.

The methods of torch's process groups are replaced by counting ones while a block runs: those that functions
of torch.distributed call, and those of the gloo groups that megackpt makes for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

COLLECTIVE_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of a process group that all of its ranks call together."""

MESSAGE_METHODS = ("recv", "recv_anysource", "send")
"""Methods of a process group that move something between two ranks."""


@dataclass(slots=True)
class Count:
    """How many collectives were begun so far."""

    value: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    """Count the collectives that this process begins while the block runs."""
    count = Count()

    def note(name: str, args: tuple[Any, ...]) -> None:
        count.value += 1

    with observed(COLLECTIVE_METHODS, note):
        yield count


@contextlib.contextmanager
def observed(names: tuple[str, ...], note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `note(name, arguments)` before each call of these methods of a process group, in this process."""

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
            note(name, (*args, *kwargs.values()))
            return method(group, *args, **kwargs)

        return noting

    # A group of torch.distributed hands its calls on below Python, so that no call is seen twice.
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    with contextlib.ExitStack() as stack:
        for cls in (dist.ProcessGroup, gloo):
            for name in names:
                if hasattr(cls, name):
                    stack.enter_context(mock.patch.object(cls, name, around(name, getattr(cls, name))))
        yield
