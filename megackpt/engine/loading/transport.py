"""Ways to move one round of an exchange: batches, broadcasts, or gathers.

Owns the buffers of a rank and how they are laid out: those that it gives from, two that take turns, hold the
parts of a round and behind them the batches; one holds what it takes. Both sides of a transfer derive the
layout from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from megackpt.comm import Group, PeerBuffer
from megackpt.comm.device_group import DeviceGroup
from megackpt.engine.data.tensor_bytes import byte_view
from megackpt.planning.exchange_plan import ExchangePlan, aligned

Directly: TypeAlias = Callable[[int], "memoryview | None"]
"""Returns the memory that a delivery may be received into."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A delivery whose bytes are here.

    Attributes:
        delivery: its row in the plan.
        data: the bytes, 1-D uint8.
        begins: where in the part they begin, in bytes; None if they are packed elements.
    """

    delivery: int
    data: torch.Tensor
    begins: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of one round.

    Attributes:
        parts: what it reads.
        outgoing: deliveries of these parts, its own ones among them; sorted by part.
        first: where those of each part begin, by part.
        incoming: deliveries to it from other ranks.
        sections: length of what each rank reads, laid out one after the other, by rank that reads anything.
        batches: where the batch to each rank lies behind the own section, and how long it is, by rank.
        coming: length of the batch from each rank, by rank.
    """

    parts: tuple[int, ...]
    outgoing: tuple[int, ...]
    first: Mapping[int, tuple[int, int]]
    incoming: tuple[int, ...]
    sections: Mapping[int, int]
    batches: Mapping[int, tuple[int, int]]
    coming: Mapping[int, int]
    given_nbytes: int
    taken_nbytes: int

    def deliveries_of(self, part: int) -> tuple[int, ...]:
        """Deliveries of one of the parts."""
        return self.outgoing[slice(*self.first[part])]


def steps_of(plan: ExchangePlan, rank: int) -> list[Step]:
    """Return a rank's part of each round."""
    numbers = np.arange(plan.rounds + 1)
    parts = np.searchsorted(plan.parts.round, numbers).tolist()
    deliveries = np.searchsorted(plan.deliveries.part, parts).tolist()
    return [
        _step(plan, rank, slice(*parts[i : i + 2]), slice(*deliveries[i : i + 2])) for i in range(plan.rounds)
    ]


def _step(plan: ExchangePlan, rank: int, of_parts: slice, of_deliveries: slice) -> Step:
    parts, deliveries = plan.parts, plan.deliveries
    reader = parts.reader[of_parts]
    ends = parts.offset[of_parts] + aligned(parts.nbytes[of_parts])
    sections = {int(r): int(ends[reader == r].max()) for r in np.unique(reader)}
    mine = of_parts.start + np.flatnonzero(reader == rank)

    part, to = deliveries.part[of_deliveries], deliveries.rank[of_deliveries]
    source = parts.reader[part]
    outgoing = np.flatnonzero(source == rank)
    incoming = np.flatnonzero((to == rank) & (source != rank))
    first = np.searchsorted(part[outgoing], mine).tolist()
    first.append(len(outgoing))
    in_batch = deliveries.is_batched[of_deliveries] & (plan.mode == "all_to_all")
    until = deliveries.offset[of_deliveries] + aligned(deliveries.nbytes[of_deliveries])
    sent = _lengths(to[outgoing], until[outgoing], in_batch[outgoing] & (to[outgoing] != rank))
    coming = _lengths(source[incoming], until[incoming], in_batch[incoming])
    batches, at = {}, sections.get(rank, 0)
    for peer, nbytes in sent.items():
        batches[peer] = (at, nbytes)
        at += nbytes
    if plan.mode == "all_to_all":
        alone = aligned(deliveries.nbytes[of_deliveries][incoming[~in_batch[incoming]]])
        taken = sum(coming.values()) + int(alone.sum())
    elif plan.mode == "gather_rounds":
        longest = max(sections.values(), default=0)
        at, taken = longest, longest * plan.size
    else:
        taken = sum(sections.values()) - sections.get(rank, 0)
    return Step(
        parts=tuple(mine.tolist()),
        outgoing=tuple((of_deliveries.start + outgoing).tolist()),
        first={u: (first[i], first[i + 1]) for i, u in enumerate(mine.tolist())},
        incoming=tuple((of_deliveries.start + incoming).tolist()),
        sections=sections,
        batches=batches,
        coming=coming,
        given_nbytes=at,
        taken_nbytes=taken,
    )


def _lengths(peers: np.ndarray, until: np.ndarray, chosen: np.ndarray) -> dict[int, int]:
    """Length of the batch of each peer that has one."""
    return {int(p): int(until[chosen & (peers == p)].max()) for p in np.unique(peers[chosen])}


class Buffers:
    """The memory that a rank gives from and takes into, as large as its largest round needs."""

    def __init__(self, steps: Sequence[Step]) -> None:
        odd_and_even = [max((s.given_nbytes for s in steps[i::2]), default=0) for i in range(2)]
        self._give = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in odd_and_even]
        self.take_nbytes = max((s.taken_nbytes for s in steps), default=0)
        self._take: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """How much memory they are."""
        return sum(b.numel() for b in self._give) + self.take_nbytes

    @property
    def take(self) -> torch.Tensor:
        """Where what is taken goes; made when first needed, as all of it may go into tensors directly."""
        if self._take is None:
            self._take = torch.empty(self.take_nbytes, dtype=torch.uint8)
        return self._take

    def given(self, parity: int, nbytes: int) -> torch.Tensor:
        """Return the first bytes of a buffer that is given from."""
        return self._give[parity][:nbytes]

    def part(self, parity: int, offset: int, nbytes: int) -> torch.Tensor:
        """Return where a part lies."""
        return self._give[parity][offset : offset + nbytes]

    def batch(self, parity: int, step: Step, rank: int) -> torch.Tensor:
        """Return where the batch to a rank lies."""
        start, nbytes = step.batches[rank]
        return self._give[parity][start : start + nbytes]


class Transport(Protocol):
    """Moves the bytes of a round."""

    def move(self, step: Step, parity: int) -> list[Arrival]:
        """Give and take one round's bytes, and return what is to be copied from the buffers. Collective."""


def transport_for(
    plan: ExchangePlan,
    group: Group,
    buffers: Buffers,
    *,
    directly: Directly,
    device: DeviceGroup | None,
) -> Transport:
    """Return what moves the rounds of a plan; device, if given, is broadcast over in place of the group."""
    if plan.mode == "all_to_all":
        return _AllToAll(plan, group, buffers, directly)
    if plan.mode == "gather_rounds":
        return _GatherRounds(plan, group, buffers)
    if plan.mode == "gather_object":
        return _GatherObject(plan, group, buffers)
    return _Broadcast(plan, group, buffers, device)


class _AllToAll:
    """Each rank is sent what it needs: large ranges as they lie in the part, all else in one batch."""

    def __init__(self, plan: ExchangePlan, group: Group, buffers: Buffers, directly: Directly) -> None:
        self._plan, self._group, self._buffers, self._directly = plan, group, buffers, directly

    def move(self, step: Step, parity: int) -> list[Arrival]:
        parts, deliveries = self._plan.parts, self._plan.deliveries
        sends = [
            (peer, byte_view(self._buffers.batch(parity, step, peer))) for peer in step.batches
        ]  # batches come first in both directions
        for d in step.outgoing:
            if deliveries.rank[d] != self._group.rank and not deliveries.is_batched[d]:
                at = int(parts.offset[deliveries.part[d]] + deliveries.start[d])
                data = self._buffers.part(parity, at, int(deliveries.nbytes[d]))
                sends.append((int(deliveries.rank[d]), byte_view(data)))
        receives, arrivals = self._expect(step)
        self._group.exchange(sends, receives)
        return arrivals

    def _expect(self, step: Step) -> tuple[list[PeerBuffer], list[Arrival]]:
        deliveries, at = self._plan.deliveries, 0
        receives: list[PeerBuffer] = []
        arrivals, batches = [], {}
        for peer, nbytes in step.coming.items():
            batches[peer] = self._buffers.take[at : at + nbytes]
            receives.append((peer, byte_view(batches[peer])))
            at += nbytes
        for d in step.incoming:
            peer, nbytes = int(self._plan.parts.reader[deliveries.part[d]]), int(deliveries.nbytes[d])
            begins = int(deliveries.start[d]) if deliveries.is_dense[d] else None
            if deliveries.is_batched[d]:
                offset = int(deliveries.offset[d])
                arrivals.append(Arrival(d, batches[peer][offset : offset + nbytes], begins))
                continue
            memory = self._directly(d)
            if memory is None:
                data = self._buffers.take[at : at + nbytes]
                at += int(aligned(np.int64(nbytes)))
                memory = byte_view(data)
                arrivals.append(Arrival(d, data, begins))
            receives.append((peer, memory))
        return receives, arrivals


class _Whole:
    """What the ways have in common that give whole sections, all parts of a reader, to everyone."""

    def __init__(self, plan: ExchangePlan, group: Group, buffers: Buffers) -> None:
        self._plan, self._group, self._buffers = plan, group, buffers

    def _arrivals(self, step: Step, sections: Mapping[int, torch.Tensor]) -> list[Arrival]:
        parts, deliveries, arrivals = self._plan.parts, self._plan.deliveries, []
        for d in step.incoming:
            part = int(deliveries.part[d])
            offset, nbytes = int(parts.offset[part]), int(parts.nbytes[part])
            data = sections[int(parts.reader[part])][offset : offset + nbytes]
            arrivals.append(Arrival(d, data, begins=0))
        return arrivals


class _Broadcast(_Whole):
    """Each reader in turn broadcasts what it has read."""

    def __init__(
        self, plan: ExchangePlan, group: Group, buffers: Buffers, device: DeviceGroup | None
    ) -> None:
        super().__init__(plan, group, buffers)
        self._device = device

    def move(self, step: Step, parity: int) -> list[Arrival]:
        sections, at = {}, 0
        for reader, nbytes in step.sections.items():
            if reader == self._group.rank:
                data = self._buffers.given(parity, nbytes)
            elif self._device is not None:
                data = self._device.empty(nbytes)
            else:
                data = self._buffers.take[at : at + nbytes]
                at += nbytes
            if self._device is not None:
                data = self._device.broadcast(data, root=reader)
            else:
                self._group.broadcast(byte_view(data), root=reader)
            sections[reader] = data
        return self._arrivals(step, sections)


class _GatherRounds(_Whole):
    """All sections of a round are gathered on all ranks at once, padded to the longest."""

    def move(self, step: Step, parity: int) -> list[Arrival]:
        longest = max(step.sections.values())
        everyone = self._buffers.take[: longest * self._plan.size]
        self._group.all_gather_into(byte_view(self._buffers.given(parity, longest)), byte_view(everyone))
        return self._arrivals(step, {r: everyone[r * longest :] for r in step.sections})


class _GatherObject(_Whole):
    """All that anybody has read is gathered on all ranks as messages."""

    def move(self, step: Step, parity: int) -> list[Arrival]:
        mine = self._buffers.given(parity, step.sections.get(self._group.rank, 0))
        messages = self._group.all_gather(bytes(byte_view(mine)))
        sections = {r: torch.frombuffer(bytearray(messages[r]), dtype=torch.uint8) for r in step.sections}
        return self._arrivals(step, sections)
