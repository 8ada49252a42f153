"""Connections between processes that find each other in a store, for bytes that are too many for it.

Owns the sockets: where this process listens, who may connect, and moving parcels over all connections at
once. A connection goes one way, and is made when the first parcel does. What is done about a peer that is
lost or late is up to `linked_group`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megackpt.comm.group import PeerBuffer

_SECRET_BYTES = 16
_HELLO_BYTES = _SECRET_BYTES + 4  # of the process that is called, and the rank that calls
_MOST_WAITING = 1024  # connections that were not taken up
_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"


class LostPeerError(Exception):
    """The connection to a rank broke."""

    def __init__(self, rank: int, why: OSError) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


class LatePeersError(Exception):
    """Some ranks have not sent, or not taken, what they were to before the deadline."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = sorted(ranks)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a process listens, and what it wants to hear from who connects.

    Attributes:
        host: name or number by which others reach it.
        port: of TCP.
        family: of addresses that it listens on, as in `socket.getaddrinfo`; 0 for any.
        secret: so that a stranger who finds the port is not taken for a rank.
    """

    host: str
    port: int
    family: int
    secret: bytes

    def to_bytes(self) -> bytes:
        """Return it as it stands in a store."""
        return json.dumps([self.host, self.port, self.family, self.secret.hex()]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LinkAddress:
        """Return what `to_bytes` was called on."""
        host, port, family, secret = json.loads(data)
        return cls(host, port, family, bytes.fromhex(secret))


class Links:
    """The connections of one rank for one piece of work.

    find returns where a rank listens. while_waiting is called again and again as long as something is to be
    moved, about once in look_every_s if nothing moves; what it raises ends the moving.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        find: Callable[[int], LinkAddress],
        while_waiting: Callable[[], None],
        look_every_s: float,
    ) -> None:
        self._rank, self._find = rank, find
        self._while_waiting, self._look_every_s = while_waiting, look_every_s
        self._listener = listen(only_here=is_loopback(host))
        port = self._listener.getsockname()[1]
        is_any = self._listener.family == socket.AF_INET6 and not is_loopback(host)  # IPv4 reaches it, too
        family = 0 if is_any else int(self._listener.family)
        self.address = LinkAddress(host, port, family, secrets.token_bytes(_SECRET_BYTES))
        self._callers: dict[socket.socket, bytearray] = {}  # who has not said all of its hello
        self._from: dict[int, socket.socket] = {}
        self._to: dict[int, socket.socket] = {}

    def move(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], *, timeout_s: float) -> None:
        """Send and receive parcels, those of each pair of ranks in order, until all have been moved.

        Raises:
            LostPeerError: the connection to a rank broke.
            LatePeersError: some was not moved within timeout_s.
        """
        going, coming = _by_rank(sends), _by_rank(receives)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, queue in going.items():
                selector.register(self._way_to(rank, queue), selectors.EVENT_WRITE, rank)
            for rank in coming.keys() & self._from.keys():
                selector.register(self._from[rank], selectors.EVENT_READ, rank)
            for caller in (self._listener, *self._callers):
                selector.register(caller, selectors.EVENT_READ)
            while going or coming:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LatePeersError(sorted(going.keys() | coming.keys()))
                for key, events in selector.select(min(left_s, self._look_every_s)):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.data is None:
                        self._hear(key.fileobj, selector, coming)
                    elif events & selectors.EVENT_WRITE:
                        _advance(selector, key.fileobj, key.data, going, key.fileobj.send)
                    else:
                        _advance(selector, key.fileobj, key.data, coming, _receiver(key.fileobj))
                self._while_waiting()

    def close(self) -> None:
        """End all connections, also those that others wait on."""
        for each in (self._listener, *self._callers, *self._from.values(), *self._to.values()):
            each.close()
        self._callers, self._from, self._to = {}, {}, {}

    def _way_to(self, rank: int, queue: deque[memoryview]) -> socket.socket:
        """Return the connection to a rank. It may be under way: then sending the first bytes says more."""
        if rank not in self._to:
            address = self._find(rank)
            try:
                self._to[rank] = _begin_to_connect(address)
            except OSError as error:
                raise LostPeerError(rank, error) from error
            queue.appendleft(memoryview(address.secret + self._rank.to_bytes(4, "little")))
        return self._to[rank]

    def _hear(
        self,
        speaker: socket.socket,
        selector: selectors.BaseSelector,
        coming: dict[int, deque[memoryview]],
    ) -> None:
        """Take up a connection, or what the other end of one says of itself."""
        if speaker is self._listener:
            with contextlib.suppress(OSError):  # who has called is gone again
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._callers[caller] = bytearray()
                selector.register(caller, selectors.EVENT_READ)
            return
        hello = self._callers[speaker]
        with contextlib.suppress(BlockingIOError):
            try:
                said = speaker.recv(_HELLO_BYTES - len(hello))
            except ConnectionError:
                said = b""
            hello += said
            is_whole = len(hello) == _HELLO_BYTES
            if said and not is_whole:
                return
            selector.unregister(speaker)
            del self._callers[speaker]
            if not is_whole or not hmac.compare_digest(hello[:_SECRET_BYTES], self.address.secret):
                speaker.close()
                return
            rank = int.from_bytes(hello[_SECRET_BYTES:], "little")
            self._from[rank] = speaker
            if rank in coming:
                selector.register(speaker, selectors.EVENT_READ, rank)


def host_towards(host: str, port: int) -> str:
    """Return the name or number by which others that reach a host, which serves a store, reach this one.

    The number of the interface through which this host reaches that one; on that host itself, its own name.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, but finds the route
            mine = probe.getsockname()[0]
            is_there = mine == address[0] or mine == "::1" or mine.startswith("127.")
            return host if is_there else str(mine)
    return host


def _by_rank(parcels: Sequence[PeerBuffer]) -> dict[int, deque[memoryview]]:
    found: dict[int, deque[memoryview]] = {}
    for rank, data in parcels:
        if data.nbytes:
            found.setdefault(rank, deque()).append(data.cast("B"))
    return found


def _advance(
    selector: selectors.BaseSelector,
    way: socket.socket,
    rank: int,
    queues: dict[int, deque[memoryview]],
    act: Callable[[memoryview], int],
) -> None:
    """Move as much as can be moved at once; end with a rank whose parcels have all been moved."""
    queue = queues[rank]
    try:
        count = act(queue[0])
    except BlockingIOError:
        return
    except OSError as error:
        raise LostPeerError(rank, error) from error
    rest = queue.popleft()[count:]
    if rest:
        queue.appendleft(rest)
    elif not queue:
        del queues[rank]
        selector.unregister(way)


def _receiver(way: socket.socket) -> Callable[[memoryview], int]:
    def receive(into: memoryview) -> int:
        count = way.recv_into(into)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "it was closed at the other end")
        return count

    return receive


def listen(*, only_here: bool) -> socket.socket:
    """Listen on a free port: of the loopback address, or of all addresses of this host."""
    if only_here:
        try:
            listener = socket.create_server((_LOOPBACK, 0), backlog=_MOST_WAITING)
        except OSError:  # a host without IPv4
            listener = socket.create_server((_LOOPBACK_6, 0), family=socket.AF_INET6, backlog=_MOST_WAITING)
    else:
        listener = _listen_everywhere()
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Say whether an address is one that `listen` takes for this host alone."""
    return host in (_LOOPBACK, _LOOPBACK_6)


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_MOST_WAITING, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=_MOST_WAITING)


def _begin_to_connect(to: LinkAddress) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(
        to.host, to.port, family=to.family, type=socket.SOCK_STREAM
    )[0]
    way = socket.socket(family, kind)
    way.setblocking(False)
    way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fault = way.connect_ex(address)
    if fault not in (0, errno.EINPROGRESS):
        way.close()
        raise OSError(fault, os.strerror(fault))
    return way
