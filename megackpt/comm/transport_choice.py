"""Opens the transport that the environment names. A transport's module is imported at its first use."""

from __future__ import annotations

import os

from megackpt.comm.store_client import StoreClient
from megackpt.comm.transport import Transport
from megackpt.errors import DeclarationError

TRANSPORT_VARIABLE = "MEGACKPT_TRANSPORT"
"""Environment variable that names the transport: `gloo`, the default, or `nixl`; equal on all ranks."""


def open_transport(client: StoreClient, *, prefix: str, rank: int, host: str) -> Transport:
    """Return the transport that the environment names. Local.

    Args:
        client: of the store in which peers find each other.
        prefix: of the keys of this transport; equal on all ranks, and used for no other transport.
        rank: of this process in its group.
        host: name or number by which the other ranks reach this host.

    Raises:
        DeclarationError: the name is unknown, or the package of the transport is not installed.
    """
    name = transport_name()
    if name == "gloo":
        from megackpt.comm.gloo_transport import PairTransport

        return PairTransport(client, prefix=prefix, rank=rank, host=host)
    if name == "nixl":
        from megackpt.comm.nixl_transport import NixlTransport

        return NixlTransport(client, prefix=prefix, rank=rank)
    raise DeclarationError(
        f"{TRANSPORT_VARIABLE}={name} names no transport. Set it to gloo or nixl, or do not set it."
    )


def transport_name() -> str:
    """Return the name of the transport that the environment asks for."""
    return os.environ.get(TRANSPORT_VARIABLE, "gloo")
