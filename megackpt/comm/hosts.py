"""The addresses of this host: where a server of this process listens, and how other hosts reach it."""

from __future__ import annotations

import contextlib
import socket

_MAX_WAITING = 1024  # connections that the server has not accepted yet
_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"


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
    """Return whether an address is one on which `listen` listens for this host alone."""
    return host in (_LOOPBACK, _LOOPBACK_6)


def host_towards(host: str, port: int) -> str:
    """Return the name or number of this host that is known to processes which reach another host.

    That is the number of the interface with the route to the other host, or the given name if the other host
    is this one.

    Args:
        host: name or number of a host that serves a store.
        port: of the store.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the route; UDP sends nothing yet
            own = probe.getsockname()[0]
            is_here = own == address[0] or own == "::1" or own.startswith("127.")
            return host if is_here else str(own)
    return host


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_MAX_WAITING, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=_MAX_WAITING)
