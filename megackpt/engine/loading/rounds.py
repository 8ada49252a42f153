"""The rounds of an exchange: the bytes that a rank sends and receives in each, and how.

A rank has two sending buffers. It reads the parts of the next round into one while it sends the other.
After the parts, a sending buffer has the batches: one for each peer, with all deliveries that are too short
for a message of their own. Bytes arrive in the receiving buffer, or directly in the target if that is
possible. Both sides of a delivery compute the layout of the buffers from the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from megackpt.comm import Group, PeerBuffer
from megackpt.comm.process_groups import DeviceGroup
from megackpt.engine.data.tensor_bytes import byte_view
from megackpt.plans.planning.exchange_plan import ExchangePlan, aligned

TargetMemory: TypeAlias = Callable[[int], "memoryview | None"]
"""Returns the memory that a delivery (a row of the plan) fills, or None if it has to be copied there."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A delivery whose bytes have arrived in a buffer.

    Attributes:
        delivery: row of the delivery in the plan.
        data: the bytes, 1-D uint8.
        begins: where in the part the bytes begin, in bytes; None if they are packed elements.
    """

    delivery: int
    data: torch.Tensor
    begins: int | None


@dataclass(frozen=True, slots=True)
class RankRound:
    """The reads, sends and receives of one rank in one round. Lengths and offsets are in bytes.

    Attributes:
        parts: parts that the rank reads.
        outgoing: deliveries of these parts, to this rank as well; sorted by part.
        first: range of `outgoing` with the deliveries of a part, by part.
        incoming: deliveries from other ranks.
        broadcast_nbytes: length of what the one reader broadcasts; 0 if ranks send each other what they need.
        batches: offset in the sending buffer and length of the batch for each peer, by rank.
        incoming_batches: length of the batch from each peer, by rank.
        sent_nbytes: length of the sending buffer.
        received_nbytes: length of the receiving buffer.
    """

    parts: tuple[int, ...]
    outgoing: tuple[int, ...]
    first: Mapping[int, tuple[int, int]]
    incoming: tuple[int, ...]
    broadcast_nbytes: int
    batches: Mapping[int, tuple[int, int]]
    incoming_batches: Mapping[int, int]
    sent_nbytes: int
    received_nbytes: int

    def deliveries_of(self, part: int) -> tuple[int, ...]:
        """Return the deliveries of a part that this rank reads."""
        return self.outgoing[slice(*self.first[part])]


def rounds_of(plan: ExchangePlan, rank: int) -> list[RankRound]:
    """Return the actions of a rank in each round of a plan."""
    # Parts are sorted by round, and deliveries by part: each round has a range of both.
    numbers = np.arange(plan.rounds + 1)
    parts = np.searchsorted(plan.parts.round, numbers).tolist()
    deliveries = np.searchsorted(plan.deliveries.part, parts).tolist()
    return [
        _round_of(plan, rank, slice(*parts[i : i + 2]), slice(*deliveries[i : i + 2]))
        for i in range(plan.rounds)
    ]


def _round_of(plan: ExchangePlan, rank: int, of_parts: slice, of_deliveries: slice) -> RankRound:
    parts, deliveries = plan.parts, plan.deliveries
    is_own = parts.reader[of_parts] == rank
    own_parts = of_parts.start + np.flatnonzero(is_own)
    # What a rank reads lies in its sending buffer one after the other, and ends where the last part does.
    ends = parts.offset[of_parts] + aligned(parts.nbytes[of_parts])
    sent_nbytes = int(ends[is_own].max(initial=0))
    broadcast_nbytes = int(ends.max(initial=0)) if plan.has_one_reader else 0

    part, receiver = deliveries.part[of_deliveries], deliveries.rank[of_deliveries]
    source = parts.reader[part]
    outgoing = np.flatnonzero(source == rank)
    incoming = np.flatnonzero((receiver == rank) & (source != rank))
    # Outgoing deliveries are sorted by part, so those of one part are a range.
    first = np.searchsorted(part[outgoing], own_parts).tolist()
    # So first[i + 1] is the end of the range of the last part, too.
    first.append(len(outgoing))
    # A batch ends where its last delivery does. The batches lie behind the parts, in order of their peers.
    in_batch = deliveries.is_batched[of_deliveries] & (not plan.has_one_reader)
    ends = deliveries.offset[of_deliveries] + aligned(deliveries.nbytes[of_deliveries])
    batches = {}
    to_peers = in_batch[outgoing] & (receiver[outgoing] != rank)
    for peer, nbytes in _batch_lengths(receiver[outgoing], ends[outgoing], to_peers).items():
        batches[peer] = (sent_nbytes, nbytes)
        sent_nbytes += nbytes
    incoming_batches = _batch_lengths(source[incoming], ends[incoming], in_batch[incoming])
    if plan.has_one_reader:
        # Rank 0 broadcasts from its sending buffer, in which it has read the parts.
        received_nbytes = 0 if rank == 0 else broadcast_nbytes
    else:
        # An upper bound: `move` receives some of these directly in their targets.
        single = aligned(deliveries.nbytes[of_deliveries][incoming[~in_batch[incoming]]])
        received_nbytes = sum(incoming_batches.values()) + int(single.sum())
    return RankRound(
        parts=tuple(own_parts.tolist()),
        outgoing=tuple((of_deliveries.start + outgoing).tolist()),
        first={number: (first[i], first[i + 1]) for i, number in enumerate(own_parts.tolist())},
        incoming=tuple((of_deliveries.start + incoming).tolist()),
        broadcast_nbytes=broadcast_nbytes,
        batches=batches,
        incoming_batches=incoming_batches,
        sent_nbytes=sent_nbytes,
        received_nbytes=received_nbytes,
    )


def _batch_lengths(peers: np.ndarray, ends: np.ndarray, is_batched: np.ndarray) -> dict[int, int]:
    """Return the length of the batch of each peer that has one."""
    return {int(p): int(ends[is_batched & (peers == p)].max()) for p in np.unique(peers[is_batched])}


class RoundBuffers:
    """The two sending buffers and the receiving buffer of a rank, as long as its rounds need.

    Even rounds use the sending buffer of parity 0, odd rounds the other one.
    """

    def __init__(self, rounds: Sequence[RankRound]) -> None:
        lengths = [max((r.sent_nbytes for r in rounds[parity::2]), default=0) for parity in range(2)]
        self._sending = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]
        self._received_nbytes = max((r.received_nbytes for r in rounds), default=0)
        self._receiving: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() for b in self._sending) + self._received_nbytes

    @property
    def receiving(self) -> torch.Tensor:
        """The receiving buffer, made when it is first needed: all bytes may go into targets directly."""
        if self._receiving is None:
            self._receiving = torch.empty(self._received_nbytes, dtype=torch.uint8)
        return self._receiving

    def part(self, parity: int, offset: int, nbytes: int) -> torch.Tensor:
        """Return the memory of a part in a sending buffer."""
        return self._sending[parity][offset : offset + nbytes]

    def batch(self, parity: int, rank_round: RankRound, peer: int) -> torch.Tensor:
        """Return the memory of the batch for a peer in a sending buffer."""
        start, nbytes = rank_round.batches[peer]
        return self._sending[parity][start : start + nbytes]


class RoundExchange(ABC):
    """Moves the bytes of a round between the ranks."""

    def __init__(self, plan: ExchangePlan, group: Group, buffers: RoundBuffers) -> None:
        self._plan, self._group, self._buffers = plan, group, buffers

    @abstractmethod
    def move(self, rank_round: RankRound, parity: int) -> list[Arrival]:
        """Send and receive the bytes of a round; return the copies into targets. Collective."""


def round_exchange_for(
    plan: ExchangePlan,
    group: Group,
    buffers: RoundBuffers,
    *,
    target_memory: TargetMemory,
    device: DeviceGroup | None,
) -> RoundExchange:
    """Return the round exchange of a plan: a broadcast if one rank reads everything.

    Args:
        plan: of the exchange.
        group: the ranks.
        buffers: of this rank.
        target_memory: where a delivery can be received directly.
        device: broadcasts go over this group instead, from device to device; None for the group.
    """
    if plan.has_one_reader:
        return _Broadcast(plan, group, buffers, device)
    return _AllToAll(plan, group, buffers, target_memory)


class _AllToAll(RoundExchange):
    """Sends each rank the bytes that it needs: long deliveries straight from the part, others in a batch."""

    def __init__(
        self, plan: ExchangePlan, group: Group, buffers: RoundBuffers, target_memory: TargetMemory
    ) -> None:
        super().__init__(plan, group, buffers)
        self._target_memory = target_memory

    def move(self, rank_round: RankRound, parity: int) -> list[Arrival]:
        parts, deliveries = self._plan.parts, self._plan.deliveries
        # Sender and receiver list the buffers of a pair in one order: the batch, then single deliveries.
        sends = [
            (peer, byte_view(self._buffers.batch(parity, rank_round, peer))) for peer in rank_round.batches
        ]
        for delivery in rank_round.outgoing:
            if deliveries.rank[delivery] != self._group.rank and not deliveries.is_batched[delivery]:
                offset = int(parts.offset[deliveries.part[delivery]] + deliveries.start[delivery])
                data = self._buffers.part(parity, offset, int(deliveries.nbytes[delivery]))
                sends.append((int(deliveries.rank[delivery]), byte_view(data)))
        receives, arrivals = self._expected(rank_round)
        self._group.exchange(sends, receives)
        return arrivals

    def _expected(self, rank_round: RankRound) -> tuple[list[PeerBuffer], list[Arrival]]:
        """Return the buffers to fill, and the deliveries that lie in the receiving buffer afterwards."""
        deliveries, offset = self._plan.deliveries, 0
        receives: list[PeerBuffer] = []
        arrivals, batches = [], {}
        for peer, nbytes in rank_round.incoming_batches.items():
            batches[peer] = self._buffers.receiving[offset : offset + nbytes]
            receives.append((peer, byte_view(batches[peer])))
            offset += nbytes
        for delivery in rank_round.incoming:
            peer = int(self._plan.parts.reader[deliveries.part[delivery]])
            nbytes = int(deliveries.nbytes[delivery])
            begins = int(deliveries.start[delivery]) if deliveries.is_dense[delivery] else None
            if deliveries.is_batched[delivery]:
                in_batch = int(deliveries.offset[delivery])
                arrivals.append(Arrival(delivery, batches[peer][in_batch : in_batch + nbytes], begins))
                continue
            memory = self._target_memory(delivery)
            if memory is None:
                data = self._buffers.receiving[offset : offset + nbytes]
                # Aligned, since the bytes are viewed as elements of the target.
                offset += int(aligned(np.array([nbytes]))[0])
                memory = byte_view(data)
                arrivals.append(Arrival(delivery, data, begins))
            receives.append((peer, memory))
        return receives, arrivals


class _Broadcast(RoundExchange):
    """Lets the one reader, rank 0, broadcast the bytes that it has read."""

    def __init__(
        self, plan: ExchangePlan, group: Group, buffers: RoundBuffers, device: DeviceGroup | None
    ) -> None:
        super().__init__(plan, group, buffers)
        self._device = device

    def move(self, rank_round: RankRound, parity: int) -> list[Arrival]:
        nbytes = rank_round.broadcast_nbytes
        if self._group.rank == 0:
            data = self._buffers.part(parity, 0, nbytes)  # its parts lie there one after the other
        elif self._device is not None:
            data = self._device.empty(nbytes)
        else:
            data = self._buffers.receiving[:nbytes]
        if self._device is not None:
            data = self._device.broadcast(data, root=0)
        else:
            self._group.broadcast(byte_view(data), root=0)
        parts, part_of = self._plan.parts, self._plan.deliveries.part
        arrivals = []
        for delivery in rank_round.incoming:
            part = int(part_of[delivery])
            offset, part_nbytes = int(parts.offset[part]), int(parts.nbytes[part])
            arrivals.append(Arrival(delivery, data[offset : offset + part_nbytes], begins=0))
        return arrivals
