"""The interface of transports, which move bulk bytes between pairs of ranks.

Writer processes send control messages through a TCPStore (see `store_group`). The server of a store is too
slow for bulk bytes, so these go through a `Transport`: point-to-point messages of torch.distributed
(`gloo_transport`), or NIXL (`nixl_transport`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from megackpt.comm.group import PeerBuffer


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
