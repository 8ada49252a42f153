"""Collectives of torch that are begun, counted.

Owns the list of functions. They are replaced by counting ones while a block runs, so that what is counted is
what really goes over the network, whatever stands in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


@dataclass(slots=True)
class Count:
    """How many there were so far."""

    value: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    """Count collectives that this process begins through `torch.distributed` while the block runs."""
    count = Count()

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            count.value += 1
            return function(*args, **kwargs)

        return counting

    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            stack.enter_context(mock.patch.object(dist, name, around(getattr(dist, name))))
        yield count
