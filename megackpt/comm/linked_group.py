"""A group of processes that meet in a store and send each other files over connections of their own.

Owns what is said where one of them is lost or late: a rank waits for one that waits for another, so who is
named is who does not answer when all are called. The connections are in `links`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megackpt.comm import store_group
from megackpt.comm.group import PeerBuffer, all_gather_by_exchange
from megackpt.comm.links import LatePeersError, LinkAddress, Links, LostPeerError, host_towards
from megackpt.comm.store_group import StoreAddress, StoreGroup
from megackpt.errors import WriterFailedError

_PAUSE_S = 0.05


class LinkedGroup(StoreGroup):
    """A `StoreGroup` that also moves much data. See `Group`.

    address is that of the store: where it is reached, ranks on its host are. Connections are made when they
    are needed, between those ranks that send each other something, and end with the group.
    """

    def __init__(
        self,
        store: Any,  # a dist.Store
        *,
        address: StoreAddress,
        prefix: str,
        rank: int,
        size: int,
        timeout_s: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            store, prefix=prefix, rank=rank, size=size, timeout_s=timeout_s, while_waiting=while_waiting
        )
        self._address = address
        self._links: Links | None = None
        self._looked = 0.0
        self._has_answered = False

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Move parcels between pairs of ranks, all of them at once."""
        try:
            self._opened().move(sends, receives, timeout_s=self._timeout_s)
        except LatePeersError as late:
            self._give_up(self._silent(late.ranks))
        except LostPeerError as lost:
            self._lost(lost)

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with what root has in it, along a tree: no rank sends it to many."""
        place = (self.rank - root) % self.size  # in the tree, whose root has 0
        if place:
            self.exchange([], [(((place & (place - 1)) + root) % self.size, data)])
        bits = (place & -place).bit_length() - 1 if place else self.size.bit_length()
        below = [place + (1 << bit) for bit in reversed(range(bits)) if place + (1 << bit) < self.size]
        self.exchange([((one + root) % self.size, data) for one in below], [])

    def all_gather_into(self, data: memoryview, gathered: memoryview) -> None:
        """Fill gathered with the data of each rank, in rank order."""
        all_gather_by_exchange(self, data, gathered)

    def leave(self) -> None:
        """Let go of the connections, and leave the meetings."""
        if self._links is not None:
            self._links.close()
            self._links = None
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._address_key(self.rank))
        super().leave()

    def _opened(self) -> Links:
        """Return the connections; others hear now where this rank listens."""
        if self._links is None:
            host = host_towards(self._address.host, self._address.port)
            self._links = Links(
                rank=self.rank,
                host=host,
                find=self._find,
                while_waiting=self._wait_on,
                look_every_s=store_group.LOOK_EVERY_S,
            )
            self._put(self._address_key(self.rank), self._links.address.to_bytes())
        return self._links

    def _find(self, rank: int) -> LinkAddress:
        return LinkAddress.from_bytes(self._take(self._address_key(rank), from_rank=rank, keep=True))

    def _address_key(self, rank: int) -> str:
        return f"{self._prefix}/at/{rank}"

    def _wait_on(self) -> None:
        """Say that this rank waits, and hear now and then whether another has given up."""
        self._while_waiting()
        now = time.monotonic()
        if now - self._looked >= store_group.LOOK_EVERY_S:
            self._looked = now
            self._look_for_abort()

    def _look_for_abort(self) -> None:
        super()._look_for_abort()
        if not self._has_answered and self._ask(self._store.check, [self._call_key()]):
            self._answer()

    def _not_come(self, from_rank: int) -> list[int]:
        return self._silent(super()._not_come(from_rank))

    def _silent(self, late: Sequence[int]) -> list[int]:
        """Call all ranks, and return those of the late that do not answer.

        Who waits for another answers. If all of the late do, return others that do not, or else the late.
        """
        self._answer()
        self._ask(self._store.set, self._call_key(), b"1")
        deadline = time.monotonic() + 2 * store_group.LOOK_EVERY_S
        silent = self._await_answers(late, deadline)
        return silent or self._await_answers(range(self.size), deadline) or list(late)

    def _await_answers(self, ranks: Sequence[int], deadline: float) -> list[int]:
        silent = list(ranks)
        while silent := [r for r in silent if not self._ask(self._store.check, [f"{self._call_key()}/{r}"])]:
            if time.monotonic() >= deadline:
                break
            self._wait_on()
            time.sleep(_PAUSE_S)
        return silent

    def _answer(self) -> None:
        self._has_answered = True
        self._ask(self._store.set, f"{self._call_key()}/{self.rank}", b"1")

    def _call_key(self) -> str:
        return f"{self._prefix}/call"

    def _lost(self, lost: LostPeerError) -> NoReturn:
        """Give up for a rank whose connection broke; its own rank has the time to say more."""
        deadline = time.monotonic() + 2 * store_group.LOOK_EVERY_S
        while time.monotonic() < deadline:
            self._wait_on()
            time.sleep(_PAUSE_S)
        self._look_for_abort()
        error = WriterFailedError(
            f"The connection to the writer process of rank {lost.rank} broke (seen by rank {self.rank}: "
            f"{lost.why}). That process or its host is gone, or its port cannot be reached: look at its log.",
            rank=lost.rank,
        )
        raise self.abort(error) from lost
