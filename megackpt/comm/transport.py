"""The interface of transports, which move bulk bytes between pairs of ranks.

Control messages of writer processes go through a TCPStore (see `store_group`). Bulk bytes, which are too many
for the server of a store, go through a `Transport`: point-to-point messages of torch.distributed
(`gloo_transport`), or NIXL (`nixl_transport`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from megackpt.comm.group import PeerBuffer
from megackpt.comm.store_client import StoreClient
from megackpt.errors import DeclarationError

TRANSPORT_VARIABLE = "MEGACKPT_TRANSPORT"
"""Environment variable that names the transport: `gloo`, the default, or `nixl`; equal on all ranks."""


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


class Transport(ABC):
    """Moves bytes between pairs of ranks, over connections that it makes when they are first used."""

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[PeerBuffer],
        receives: Sequence[PeerBuffer],
        *,
        timeout_s: float,
        while_waiting: Callable[[], None],
        look_every_s: float,
    ) -> None:
        """Move bytes between this rank and its peers, all peers at once; see `Group.exchange`.

        After an error the buffers may still be read or filled until timeout_s has passed.

        Args:
            sends: buffers for peers.
            receives: buffers to fill, from peers.
            timeout_s: deadline for all of it, in seconds.
            while_waiting: called about every look_every_s seconds; an exception that it raises ends the
                exchange.
            look_every_s: in seconds.

        Raises:
            LostPeerError: the connection to a peer broke.
            LatePeersError: not all bytes were moved within timeout_s.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


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
        f"{TRANSPORT_VARIABLE}={name} names no transport. Give gloo or nixl, or leave it out."
    )


def transport_name() -> str:
    """Return the name of the transport that the environment asks for."""
    return os.environ.get(TRANSPORT_VARIABLE, "gloo")
