"""The interface of transports, which move bulk bytes between pairs of ranks.

Writer processes send control messages through a TCPStore (see `store_group`). The server of a store is too
slow for bulk bytes, so these go through a `Transport`: point-to-point messages of torch.distributed
(`gloo_transport`), or the transport of a package that the environment names, such as NIXL.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol, cast

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
        from megackpt.comm.gloo_transport import PairTransport

        return PairTransport(client, prefix=prefix, rank=rank, host=host)
    points = entry_points(group=ENTRY_POINTS)
    if name not in points.names:
        known = ", ".join(sorted({"gloo", *points.names}))
        raise DeclarationError(
            f"{TRANSPORT_VARIABLE}={name} names no transport. Known are {known}. Set it to one of these, or "
            f"do not set it."
        )
    return cast(OpenTransport, points[name].load())(client, prefix=prefix, rank=rank, host=host)
