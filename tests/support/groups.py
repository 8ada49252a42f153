"""Groups of ranks that do less, or more, than those of the library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megackpt.comm import Group, compare_step, gather_step, scatter_step
from megackpt.comm.store_host import StoreAddress, connect_store


class MessagesOnly(Group):
    """A group of a user, with only the two methods that a group must implement."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        return self._group.gather(data)


def on_clients(server: Any, ranks: int, act: Callable[[Any, int], Any]) -> list[Any]:
    """Run on every rank, each with a client of its own and its number; return results or errors."""
    address = StoreAddress("localhost", server.port)
    connected = threading.Barrier(ranks)  # only from then on do deadlines count

    def run_rank(rank: int) -> Any:
        client = connect_store(address, timeout_s=30)
        connected.wait(60)
        try:
            return act(client, rank)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run_rank, range(ranks)))


def shared(group: Group, data: bytes, *, doing: str = "sharing") -> list[bytes]:
    """Return the data of all ranks on every rank."""
    with gather_step(group, doing, on_all_ranks=True) as step:
        step.data = data
    return step.results


def gathered(group: Group, data: bytes, *, doing: str = "sending") -> list[bytes]:
    """Return the data of all ranks on rank 0, and nothing elsewhere."""
    with gather_step(group, doing) as step:
        step.data = data
    return step.results


def scattered(group: Group, parts: Sequence[bytes], *, doing: str = "giving") -> bytes:
    """Return this rank's part of those that rank 0 has."""
    with scatter_step(group, doing) as step:
        step.parts = parts
    return step.part


def compared(
    group: Group, equal: Sequence[int], largest: Sequence[int] = (), *, doing: str = "comparing"
) -> tuple[list[bool], list[int]]:
    """Return which numbers are equal on all ranks, and the largest of the others."""
    names, others = (
        [f"{kind} {n}" for n in range(len(numbers))] for kind, numbers in (("e", equal), ("l", largest))
    )
    with compare_step(group, doing, equal=names, largest=others) as step:
        step.equal, step.largest = (
            dict(zip(names, equal, strict=True)),
            dict(zip(others, largest, strict=True)),
        )
    return [step.is_equal[name] for name in names], [step.maximum[name] for name in others]
