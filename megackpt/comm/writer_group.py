"""The group of writer processes that also send each other files.

Control messages go through the store (see `store_group`), bulk bytes through a transport (see `transport`).

A rank that waits in an exchange cannot know who is lost: its peer may itself wait for another rank. So the
first rank whose deadline passes calls all ranks through the store. Its error names the ranks that do not
answer the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from megackpt.comm import store_group
from megackpt.comm.group import PeerBuffer, first_line
from megackpt.comm.store_client import StoreClient
from megackpt.comm.store_group import StoreGroup
from megackpt.comm.store_host import StoreAddress, host_towards
from megackpt.comm.transport import LatePeersError, LostPeerError, Transport, open_transport
from megackpt.errors import WriterFailedError

_PAUSE_S = 0.05


class WriterGroup(StoreGroup):
    """A `StoreGroup` with a transport for bulk bytes.

    The transport is opened by the first exchange, connects those ranks that send each other something, and is
    closed by `leave`.

    Args:
        address: of the store. Other ranks reach this rank by the interface with the route to that host.
    """

    def __init__(
        self,
        store: StoreClient,
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
        self._transport: Transport | None = None
        self._looked_at = 0.0  # time.monotonic() when this rank last looked for an error of another rank
        self._has_answered = False  # whether this rank has answered a call to all ranks

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Move bytes between pairs of ranks, all pairs at once."""
        transport = self._open_transport()
        try:
            transfer = transport.begin(sends, receives, timeout_s=self._timeout_s)
            # Short waits: between two of them, this rank sees whether another rank has given up.
            while not transfer.wait(store_group.LOOK_EVERY_S):
                self._wait()
        except LatePeersError as late:
            self._give_up(self._silent_ranks(late.ranks))
        except LostPeerError as lost:
            self._raise_lost_peer(lost)

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with the bytes of root, along a binomial tree.

        A rank receives from one rank, and sends to at most log2(size) ranks.
        """
        position = (self.rank - root) % self.size  # in the tree; the root has 0
        if position:
            # The parent sends first. This rank goes on when it has the data.
            parent = position & (position - 1)
            self.exchange([], [((parent + root) % self.size, data)])
        # A rank sends to the positions that differ from its own in one bit below its lowest bit.
        bits = (position & -position).bit_length() - 1 if position else self.size.bit_length()
        children = [position + (1 << bit) for bit in reversed(range(bits))]
        self.exchange([((child + root) % self.size, data) for child in children if child < self.size], [])

    def leave(self) -> None:
        """Close the connections, and leave the group."""
        self.close_transport()
        super().leave()

    def close_transport(self) -> None:
        """Close the connections. Local."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _open_transport(self) -> Transport:
        if self._transport is None:
            host = host_towards(self._address.host, self._address.port)
            try:
                self._transport = open_transport(self._store, prefix=self._prefix, rank=self.rank, host=host)
            except RuntimeError as error:
                failure = WriterFailedError(
                    f"The writer process of rank {self.rank} cannot listen at {host}: "
                    f"{first_line(error)}. Other writer processes send it copies of their files there.",
                    rank=self.rank,
                )
                raise self.abort(failure) from error
        return self._transport

    def _wait(self) -> None:
        """Show that this rank is alive, and raise the error with which another rank has given up, if any."""
        self._while_waiting()
        now = time.monotonic()
        if now - self._looked_at >= store_group.LOOK_EVERY_S:
            self._looked_at = now
            self._look_for_abort()

    def _look_for_abort(self) -> None:
        super()._look_for_abort()
        # A rank that waits for a lost one is alive: it answers while it waits.
        if not self._has_answered and self._ask(self._store.check, [self._call_key()]):
            self._answer()

    def _missing_ranks(self, from_rank: int) -> list[int]:
        return self._silent_ranks(super()._missing_ranks(from_rank))

    def _silent_ranks(self, late: Sequence[int]) -> list[int]:
        """Call all ranks, and return the late ranks that do not answer.

        A rank that waits for another one answers. If all late ranks answer, the result has the other ranks
        that do not; if all ranks answer, the result has the late ranks.
        """
        # Before the call: this rank must never count as silent.
        self._answer()
        self._ask(self._store.set, self._call_key(), b"1")
        deadline = time.monotonic() + 2 * store_group.LOOK_EVERY_S
        silent = self._wait_for_answers(late, deadline)
        return silent or self._wait_for_answers(range(self.size), deadline) or list(late)

    def _wait_for_answers(self, ranks: Sequence[int], deadline: float) -> list[int]:
        silent = list(ranks)
        while silent := [r for r in silent if not self._ask(self._store.check, [f"{self._call_key()}/{r}"])]:
            if time.monotonic() >= deadline:
                break
            self._wait()
            time.sleep(_PAUSE_S)
        return silent

    def _answer(self) -> None:
        self._has_answered = True
        self._ask(self._store.set, f"{self._call_key()}/{self.rank}", b"1")

    def _call_key(self) -> str:
        return f"{self._prefix}/call"

    def _raise_lost_peer(self, lost: LostPeerError) -> NoReturn:
        """Raise the error of a broken connection, or that of the peer if it gives up within two seconds."""
        # A peer that gives up closes its connections. Its own error says more, and may come a little later.
        deadline = time.monotonic() + 2 * store_group.LOOK_EVERY_S
        while time.monotonic() < deadline:
            self._wait()
            time.sleep(_PAUSE_S)
        self._look_for_abort()
        error = WriterFailedError(
            f"The connection to the writer process of rank {lost.rank} broke (seen by rank {self.rank}: "
            f"{first_line(lost.why)}). That process or its host is gone, or its port cannot be reached: look "
            f"at its log.",
            rank=lost.rank,
        )
        raise self.abort(error) from lost
