"""The store through which writer processes exchange messages: rank 0 serves it, the other ranks connect.

This module also finds the addresses of this host: where a server listens, and how other hosts reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from megackpt.comm.collectives import errors_on_all_ranks, gather_step, scatter_step
from megackpt.comm.group import Group
from megackpt.comm.store_client import StoreClient
from megackpt.errors import RankFailedError

_CONNECTING_S = 0.5
_MAX_WAITING = 1024  # connections that the server has not accepted yet
_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is served."""

    host: str
    port: int


class StoreHost:
    """One end of a store: the server on rank 0, a client elsewhere.

    The server runs in threads of its own that need no interpreter lock.
    """

    def __init__(self, store: StoreClient, address: StoreAddress) -> None:
        self._store: StoreClient | None = store
        self.address = address

    def abort(self, prefix: str, error: bytes) -> bytes:
        """Make the ranks of the group with a prefix raise an error. Does nothing if the store is gone.

        Returns:
            The encoded error that they raise: that of the first rank that called this.
        """
        with contextlib.suppress(RuntimeError):
            return first_error(self._client, prefix, error)
        return error

    def is_aborted(self, prefix: str) -> bool:
        """Return whether a rank of the group with a prefix has given up."""
        with contextlib.suppress(RuntimeError):
            return self._client.check([abort_key(prefix)])
        return False

    def leave(self, prefix: str) -> None:
        """Leave the group with a prefix in place of a process that died."""
        with contextlib.suppress(RuntimeError):
            self._client.add(left_key(prefix), 1)

    def key_count(self) -> int:
        """Return how many keys the store holds."""
        return self._client.num_keys()

    def close(self) -> None:
        """Close the server or the connection."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    def _client(self) -> StoreClient:
        if self._store is None:
            raise RuntimeError("the store is closed")
        return self._store


def host_store(group: Group, *, timeout_s: float, host: str | None = None) -> StoreHost:
    """Serve a store on rank 0, and connect every rank to it. Collective over the group.

    If all ranks have the same host name, the store listens on the loopback address only; otherwise on all
    addresses.

    Args:
        group: the ranks.
        timeout_s: deadline of the store's clients, in seconds; see `connect_store`.
        host: name or address by which other hosts reach rank 0; None for MASTER_ADDR, or rank 0's full name
            if that is not set.

    Raises:
        RankFailedError: a rank cannot reach the store, or rank 0 cannot serve it.
    """
    with gather_step(group, "naming the hosts of the writers", on_all_ranks=True) as naming:
        naming.data = socket.gethostname().encode()
    # A given host is a name for other hosts, so the store must not listen on the loopback address only.
    is_one_host = host is None and len(set(naming.results)) == 1
    store: StoreClient | None = None
    with scatter_step(group, "serving the store of the writers") as serving:
        if group.rank == 0:
            listener = listen(only_here=is_one_host)
            served_host, port = listener.getsockname()[:2]
            if not is_one_host:
                served_host = host or os.environ.get("MASTER_ADDR") or socket.getfqdn()
            # The server must run before the others learn its address.
            store = _open_store(StoreAddress(served_host, port), listener=listener, timeout_s=timeout_s)
            serving.parts = [json.dumps([served_host, port]).encode()] * group.size
    address = StoreAddress(*json.loads(serving.part))
    with errors_on_all_ranks(group, "connecting to the store of the writers"):
        store = store or connect_store(address, timeout_s=timeout_s)
    return StoreHost(store, address)


def connect_store(address: StoreAddress, *, timeout_s: float) -> StoreClient:
    """Return a client of a store. Local.

    The client has half of timeout_s to connect, and a third of it for every call. A store that is silent for
    longer counts as lost. So a rank that afterwards waits for other ranks waits less than twice timeout_s
    in all.

    Raises:
        RankFailedError: the store cannot be reached.
    """
    try:
        return _open_store(address, timeout_s=timeout_s)
    except RuntimeError as error:
        raise RankFailedError(
            f"The store of rank 0 at {address.host}:{address.port} cannot be reached: {error}. Look at the "
            f"log of rank 0; if that host has another name here, give it as coordinator_host.",
            rank=0,
        ) from error


def _open_store(
    address: StoreAddress, *, timeout_s: float, listener: socket.socket | None = None
) -> StoreClient:
    """Return a client of a store. With a listener, serve the store, too; it takes over the listener."""
    connect_s = timeout_s / 2

    def connect() -> Any:
        open_with = partial(
            dist.TCPStore,  # type: ignore[attr-defined]
            # Rank 0 need not resolve the name that other hosts know: its server is local.
            address.host if listener is None or is_loopback(address.host) else "localhost",
            address.port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=connect_s),
            multi_tenant=False,
            # The socket has its port already, so no other process can take it before the server starts.
            master_listen_fd=None if listener is None else listener.detach(),
        )
        try:
            return open_with()
        except NotImplementedError:  # torch 2.6: libuv cannot take over a listener
            return open_with(use_libuv=False)

    # Longer than the deadline of the TCPStore, whose own error says more.
    return StoreClient(
        connect, port=address.port, connect_s=connect_s + _CONNECTING_S, answer_s=timeout_s / 3
    )


def first_error(store: StoreClient, prefix: str, error: bytes) -> bytes:
    """Store an error for the ranks of the group with a prefix, unless there is one; return the stored one.

    This is one atomic request to the server. So all ranks raise the same error if two ranks give up at once.
    """
    return store.compare_set(abort_key(prefix), "", error.decode())


def abort_key(prefix: str) -> str:
    """Return the key under which the first error of the group with a prefix is stored."""
    return f"{prefix}/abort"


def left_key(prefix: str) -> str:
    """Return the key that counts the ranks that have left the group with a prefix."""
    return f"{prefix}/left"


def listen(*, only_here: bool) -> socket.socket:
    """Listen on a free port: of the loopback address, or of all addresses of this host."""
    if only_here:
        try:
            listener = socket.create_server((_LOOPBACK, 0), backlog=_MAX_WAITING)
        except OSError:  # a host without IPv4
            listener = socket.create_server((_LOOPBACK_6, 0), family=socket.AF_INET6, backlog=_MAX_WAITING)
    else:
        listener = _listen_everywhere()
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Return whether an address is one of those on which `listen(only_here=True)` listens."""
    return host in (_LOOPBACK, _LOOPBACK_6)


def host_towards(host: str, port: int) -> str:
    """Return the address at which the ranks of a job reach this host.

    That is the address of the interface with the route to the host of the store. If the store is on this
    host, it is the given name or address.

    Args:
        host: name or address of the host that serves the store.
        port: of the store.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the route; UDP sends nothing yet
            own = probe.getsockname()[0]
            # The store is on this host: its own address is the one that the others know.
            is_here = own == address[0] or own == "::1" or own.startswith("127.")
            return host if is_here else str(own)
    return host


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        # A kernel may know IPv6 and have it disabled. Then the host has IPv4 only.
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_MAX_WAITING, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=_MAX_WAITING)
