"""The interface of transports, which move bulk bytes between pairs of ranks.

Control messages of writer processes go through a TCPStore (see `store_group`). Bulk bytes, which are too many
for the server of a store, go through a `Transport`: point-to-point messages of torch.distributed
(`gloo_transport`), or NIXL (`nixl_transport`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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
