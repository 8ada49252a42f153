"""The interface of transports, which move bulk bytes between pairs of ranks.

Writer processes send control messages through a TCPStore (see `store_group`). The server of a store is too
slow for bulk bytes, so these go through a `Transport`: point-to-point messages of torch.distributed (below),
or the transport of a package that the environment names, such as NIXL.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

from megackpt.comm.group import PeerBuffer
from megackpt.comm.store_client import StoreClient
from megackpt.errors import DeclarationError

TRANSPORT_VARIABLE = "MEGACKPT_TRANSPORT"
"""Environment variable with the name of the transport: `gloo`, or an entry point. Equal on all ranks."""

ENTRY_POINTS = "megackpt.transports"
"""Entry points of packages: the name is that of a transport, the value an `OpenTransport`."""


class LostPeerError(RuntimeError):
    """The connection to a rank broke.

    Attributes:
        rank: of the group.
        why: the error of the transport.
    """

    def __init__(self, rank: int, why: Exception) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


class LatePeersError(RuntimeError):
    """Ranks did not send, or did not accept, all their bytes before the deadline.

    Attributes:
        ranks: of the group, ascending.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = sorted(ranks)


class Transfer(ABC):
    """Bytes that are being moved between this rank and its peers."""

    @abstractmethod
    def wait(self, most_s: float = math.inf) -> bool:
        """Wait until all bytes are moved, for about most_s seconds at most; return whether they are.

        Raises:
            LostPeerError: the connection to a peer broke.
            LatePeersError: not all bytes were moved before the deadline.
        """


class Transport(ABC):
    """Moves bytes between pairs of ranks, over connections that it makes when they are first used."""

    @abstractmethod
    def begin(
        self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], *, timeout_s: float
    ) -> Transfer:
        """Begin to move bytes between this rank and its peers, all peers at once; see `Group.exchange`.

        The caller waits for this transfer before it begins another one. After an error the buffers may still
        be read or filled until timeout_s has passed.

        Args:
            sends: buffers for peers.
            receives: buffers to fill, from peers.
            timeout_s: deadline for the whole transfer, in seconds.

        Raises:
            LostPeerError: the connection to a peer broke.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class OpenTransport(Protocol):
    """Opens a transport: a function, or a class of transports. Local."""

    def __call__(self, client: StoreClient, *, prefix: str, rank: int, host: str) -> Transport:
        """Return the transport of this rank.

        Args:
            client: of the store in which peers find each other.
            prefix: of the keys of this transport; equal on all ranks, and used for no other transport.
            rank: of this process in its group.
            host: name or number by which the other ranks reach this host.

        Raises:
            DeclarationError: a package that the transport needs is not installed.
        """


def transport_name() -> str:
    """Return the name of the transport that the environment asks for."""
    return os.environ.get(TRANSPORT_VARIABLE, "gloo")


def open_transport(client: StoreClient, *, prefix: str, rank: int, host: str) -> Transport:
    """Open the transport that the environment names; arguments as of `OpenTransport`. Local.

    Its module is imported at its first use.

    Raises:
        DeclarationError: the name is unknown, or the package of the transport is not installed.
    """
    name = transport_name()
    if name == "gloo":
        return PairTransport(client, prefix=prefix, rank=rank, host=host)
    points = entry_points(group=ENTRY_POINTS)
    if name not in points.names:
        known = ", ".join(sorted({"gloo", *points.names}))
        raise DeclarationError(
            f"{TRANSPORT_VARIABLE}={name} names no transport. Known are {known}. Set it to one of these, or "
            f"do not set it."
        )
    return cast(OpenTransport, points[name].load())(client, prefix=prefix, rank=rank, host=host)


# Transports over point-to-point messages of gloo, the engine of torch.distributed for hosts.
#
# The ranks of a training job have a gloo process group already, which `MeshTransport` uses. Writer processes
# have none: in a `PairTransport` each pair of ranks that exchanges bytes has a process group of two
# ranks. So an error of gloo belongs to one peer, a missed deadline closes no other connection,
# and a job of many ranks has only the connections that it needs.

_c10d: Any = dist.distributed_c10d  # gloo's class and options: not all builds of torch have them

_PAUSE_S = 0.002
_NEAR_S = 0.05  # an error this close to the deadline means that the deadline has passed

_Buffers: TypeAlias = "list[memoryview]"
_Reports: TypeAlias = "queue.SimpleQueue[tuple[int, Exception | None]]"
_Request: TypeAlias = "tuple[_Buffers, _Buffers, float, _Reports]"


def start_messages(
    group: Any, peer: int, *, sends: Sequence[memoryview], receives: Sequence[memoryview]
) -> list[Any]:
    """Begin to send buffers to a peer of a gloo process group, and to receive from it; return the `Work`s.

    The tag of a message is made of its number and its direction. The number makes the i-th buffer sent fill
    the i-th buffer received. A group with two devices sends even tags over the first and odd tags over the
    second, so each direction has a connection and a thread of its own.
    """
    is_higher = int(group.rank() > peer)
    works = [
        group.recv([tensor_over(data)], peer, 2 * number + 1 - is_higher)
        for number, data in enumerate(receives)
    ]
    works += [
        group.send([tensor_over(data)], peer, 2 * number + is_higher) for number, data in enumerate(sends)
    ]
    return works


def by_peer(
    sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]
) -> dict[int, tuple[_Buffers, _Buffers]]:
    """Return the buffers that are sent to each peer and received from it; empty ones are left out."""
    peers: dict[int, tuple[_Buffers, _Buffers]] = {}
    for direction, buffers in enumerate((sends, receives)):
        for peer, data in buffers:
            # `torch.frombuffer` rejects empty buffers. Both ranks know the lengths, so neither waits.
            if data.nbytes:
                peers.setdefault(peer, ([], []))[direction].append(data)
    return peers


def tensor_over(data: memoryview) -> torch.Tensor:
    """Return a tensor of bytes that shares the memory of a buffer."""
    return torch.frombuffer(data, dtype=torch.uint8)


class MeshTransport(Transport):
    """A transport over one gloo process group that connects all ranks.

    gloo closes all connections of the group if a deadline passes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin(
        self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], *, timeout_s: float
    ) -> _MeshTransfer:
        """Begin to move bytes between this rank and its peers; see `Transport.begin`."""
        works: list[tuple[int, Any]] = []
        for peer, (outgoing, incoming) in by_peer(sends, receives).items():
            try:
                started = start_messages(self._group, peer, sends=outgoing, receives=incoming)
            except RuntimeError as error:  # the peer has closed its connection
                raise LostPeerError(peer, error) from error
            works += [(peer, work) for work in started]
        return _MeshTransfer(works, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Leave the process group to its owner."""
        self._group = None


@dataclass(frozen=True, slots=True)
class _MeshTransfer(Transfer):
    """A transfer of a `MeshTransport`: the `Work` of each message, with its peer."""

    works: Sequence[tuple[int, Any]]
    deadline: float

    def wait(self, most_s: float = math.inf) -> bool:
        """Wait until all bytes are moved, whatever most_s is: gloo cannot be interrupted."""
        for peer, work in self.works:
            try:
                work.wait(_until(self.deadline))
            except RuntimeError as error:
                # gloo raises one class for broken connections and missed deadlines. Only the time differs.
                if time.monotonic() < self.deadline - _NEAR_S:
                    raise LostPeerError(peer, error) from error
                raise LatePeersError([peer]) from error
        return True


class PairTransport(Transport):
    """A transport with one gloo process group for each pair of ranks; arguments as of `open_transport`."""

    def __init__(self, client: StoreClient, *, prefix: str, rank: int, host: str) -> None:
        self._rank = rank
        self._rendezvous = _Rendezvous(client, f"{prefix}/gloo")
        # One for each direction, see `start_messages`.
        self._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host) for _ in range(2)]
        self._peers: dict[int, _PeerThread] = {}

    def begin(
        self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], *, timeout_s: float
    ) -> _PairTransfer:
        """Begin to move bytes between this rank and its peers; see `Transport.begin`."""
        peers = by_peer(sends, receives)
        transfer = _PairTransfer(time.monotonic() + timeout_s, set(peers))
        for peer, (outgoing, incoming) in peers.items():
            if peer not in self._peers:
                self._peers[peer] = _PeerThread(peer, self._connect)
            self._peers[peer].move(outgoing, incoming, transfer.deadline, transfer.reports)
        return transfer

    def close(self) -> None:
        """Close the connections, each as soon as no message waits for its deadline."""
        for thread in self._peers.values():
            thread.close()
        self._peers = {}
        self._rendezvous.clear()

    def _connect(self, peer: int, deadline: float) -> tuple[Any, int]:
        """Return a process group of this rank and a peer, and the number of the peer in it."""
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = self._devices
        # The constructor of the group waits for the peer, so the deadline of the transfer holds for it, too.
        options._timeout = _until(deadline)
        # Both ranks look for each other under one name, so it must not depend on which of them asks.
        low, high = sorted((self._rank, peer))
        store = dist.PrefixStore(f"{low}-{high}", self._rendezvous)  # type: ignore[attr-defined]
        group = _c10d.ProcessGroupGloo(store, int(self._rank == high), 2, options)
        return group, int(peer == high)


@dataclass(slots=True)
class _PairTransfer(Transfer):
    """A transfer of a `PairTransport`.

    Attributes:
        deadline: of all messages.
        under_way: the peers whose threads have not reported yet.
        late: the peers that have missed the deadline.
        reports: what the threads have reported.
    """

    deadline: float
    under_way: set[int]
    late: list[int] = field(default_factory=list)
    reports: _Reports = field(default_factory=queue.SimpleQueue)

    def wait(self, most_s: float = math.inf) -> bool:
        """Wait for the threads of all peers; see `Transfer.wait`."""
        until = time.monotonic() + most_s
        while self.under_way:
            rest_s = until - time.monotonic()
            try:
                peer, error = self.reports.get(timeout=None if rest_s == math.inf else max(0.0, rest_s))
            except queue.Empty:
                return False
            self.under_way.remove(peer)
            # A broken connection ends the transfer at once, but late peers are named all together.
            if error is not None and time.monotonic() < self.deadline - _NEAR_S:
                raise LostPeerError(peer, error) from error
            if error is not None:
                self.late.append(peer)
        if self.late:
            raise LatePeersError(self.late)
        return True


class _PeerThread:
    """The thread that exchanges messages with one peer: a call of gloo blocks until its deadline."""

    def __init__(self, peer: int, connect: Callable[[int, float], tuple[Any, int]]) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        arguments = self._requests, peer, connect
        # A daemon thread: a call of gloo that still waits must not keep the process from ending.
        threading.Thread(target=_serve, args=arguments, name=f"megackpt-peer-{peer}", daemon=True).start()

    def move(self, sends: _Buffers, receives: _Buffers, deadline: float, reports: _Reports) -> None:
        """Move the buffers in the thread, which reports the peer, and None or the error."""
        self._requests.put((sends, receives, deadline, reports))

    def close(self) -> None:
        """Let the thread close the connection and end."""
        self._requests.put(None)


def _serve(
    requests: queue.SimpleQueue[_Request | None],
    peer: int,
    connect: Callable[[int, float], tuple[Any, int]],
) -> None:
    connection: tuple[Any, int] | None = None
    while (request := requests.get()) is not None:
        sends, receives, deadline, reports = request
        error: Exception | None = None
        try:
            # In this thread: connecting waits for the peer, and `begin` begins with all peers at once.
            if connection is None:
                connection = connect(peer, deadline)
            group, number = connection
            _finish(start_messages(group, number, sends=sends, receives=receives), deadline)
        # Whatever is raised, it must be reported: the caller waits for a report of every peer.
        except Exception as failure:  # noqa: BLE001 - raised in the thread that waits
            error = failure
        reports.put((peer, error))
        # The caller's memory is released before the thread waits for the next request.
        del request, sends, receives, reports, error


def _finish(under_way: Iterable[Any], deadline: float) -> None:
    """Wait for messages. Here, so that no name in the thread's loop keeps the last one, and its memory."""
    for work in under_way:
        work.wait(_until(deadline))


class _Rendezvous(dist.Store):  # type: ignore[misc, name-defined]
    """A view of a store through which gloo finds a peer. It waits by polling, never in a call of the store.

    A TCPStore that waits holds a lock, for which every other call of this process would wait: also the call
    by which this rank learns that another rank has given up.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        super().__init__()
        self._client, self._prefix = client, prefix
        self._own_keys: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        name = f"{self._prefix}/{key}"
        self._own_keys.append(name)
        self._client.set(name, bytes(value))

    def get(self, key: str) -> bytes:
        return self._client.get(f"{self._prefix}/{key}")

    def check(self, keys: list[str]) -> bool:
        return self._client.check([f"{self._prefix}/{key}" for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or timedelta(seconds=30)).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError("the other rank did not connect")
            time.sleep(_PAUSE_S)

    def clear(self) -> None:
        """Remove the keys of this rank, as far as the store answers."""
        try:
            for key in self._own_keys:
                self._client.delete_key(key)
        except RuntimeError:
            return


def _until(deadline: float) -> timedelta:
    # Never 0: `Work.wait` then waits for the timeout of the group.
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))
