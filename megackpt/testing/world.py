"""A simulated world: ranks as threads of one process.

Owns a Group whose ranks meet at barriers in memory. The same save and load run on it as on real processes,
so a property test can try thousands of layouts in the time that starting one real world takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megackpt.comm import Group
from megackpt.errors import RankFailedError

T = TypeVar("T")


class SimulatedWorld:
    r"""A number of ranks that run a function at the same time, each in a thread.

    >>> SimulatedWorld(3).run(lambda group: group.all_gather(bytes([group.rank])))[2]
    [b'\x00', b'\x01', b'\x02']

    Attributes:
        bytes_sent: how many bytes each rank has put into messages so far, `[size]`.
        messages: how many messages each rank has taken part in, `[size]`.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self.bytes_sent = [0] * size
        self.messages = [0] * size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._slots: dict[int, bytes] = {}  # what has been said in the meeting that is under way
        self._meeting = 0
        self._minutes: list[bytes] = []  # what was said in the last one that ended
        self._gone: set[int] = set()

    def run(self, fn: Callable[[Group], T]) -> list[T]:
        """Return what `fn(group)` returned on each rank, or raise the lowest failing rank's error."""
        outcomes = self.outcomes(fn)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, fn: Callable[[Group], T]) -> list[Any]:
        """Return per rank what `fn(group)` returned, or the exception that it raised."""

        def call(rank: int) -> T | Exception:
            try:
                return fn(_SimulatedRank(self, rank))
            except Exception as error:  # noqa: BLE001 - an outcome like any other
                return error
            finally:
                with self._changed:  # whoever waits for this rank waits in vain
                    self._gone.add(rank)
                    self._changed.notify_all()

        self._slots, self._gone = {}, set()
        if self.size == 1:
            return [call(0)]
        with ThreadPoolExecutor(max_workers=self.size) as pool:
            return list(pool.map(call, range(self.size)))

    def _meet(self, rank: int, data: bytes) -> list[bytes]:
        with self._changed:
            self.bytes_sent[rank] += len(data)
            self.messages[rank] += 1
            self._slots[rank] = data
            meeting = self._meeting
            if len(self._slots) == self.size:
                # Nobody can end the next meeting before all have come to it, so the minutes stay until all
                # have read.
                self._minutes = [self._slots[r] for r in range(self.size)]
                self._slots = {}
                self._meeting += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._meeting != meeting or self._absent(), self._timeout_s)
            if self._meeting == meeting:
                who = sorted(self._absent() or set(range(self.size)) - set(self._slots))
                del self._slots[rank]  # who comes late shall not find it complete
                self._gone.add(rank)
                raise RankFailedError(f"Simulated rank(s) {who} did not answer within {self._timeout_s:g} s.")
            return self._minutes

    def _absent(self) -> set[int]:
        """Ranks that have ended without coming to the meeting under way."""
        return self._gone - set(self._slots)


class _SimulatedRank:
    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._world._meet(self.rank, data)

    def gather(self, data: bytes) -> list[bytes]:
        everyone = self._world._meet(self.rank, data)
        return everyone if self.rank == 0 else []
