"""Ways to move one round of an exchange: parcels, broadcasts, or gathers.

Owns the buffers of a rank and how they are laid out: those that it gives from, two that take turns, hold the
units of a round and behind them the parcels; one holds what it takes. Both sides of a transfer derive the
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
from megackpt.planning.exchange import ExchangePlan, aligned

Directly: TypeAlias = Callable[[int], "memoryview | None"]
"""Returns the memory that a delivery may be received into."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A delivery whose bytes are here.

    Attributes:
        delivery: its row in the plan.
        data: the bytes, 1-D uint8.
        begins: where in the unit they begin, in bytes; None if they are packed elements.
    """

    delivery: int
    data: torch.Tensor
    begins: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of one round.

    Attributes:
        units: what it reads.
        outgoing: deliveries of these units, its own ones among them; sorted by unit.
        first: where those of each unit begin, by unit.
        incoming: deliveries to it from other ranks.
        sections: length of what each rank reads, laid out one after the other, by rank that reads anything.
        parcels: where the parcel to each rank lies behind the own section, and how long it is, by rank.
        coming: length of the parcel from each rank, by rank.
    """

    units: tuple[int, ...]
    outgoing: tuple[int, ...]
    first: Mapping[int, tuple[int, int]]
    incoming: tuple[int, ...]
    sections: Mapping[int, int]
    parcels: Mapping[int, tuple[int, int]]
    coming: Mapping[int, int]
    given_nbytes: int
    taken_nbytes: int

    def deliveries_of(self, unit: int) -> tuple[int, ...]:
        """Deliveries of one of the units."""
        return self.outgoing[slice(*self.first[unit])]


def steps_of(plan: ExchangePlan, rank: int) -> list[Step]:
    """Return a rank's part of each round."""
    numbers = np.arange(plan.rounds + 1)
    units = np.searchsorted(plan.units.round, numbers).tolist()
    deliveries = np.searchsorted(plan.deliveries.unit, units).tolist()
    return [
        _step(plan, rank, slice(*units[i : i + 2]), slice(*deliveries[i : i + 2])) for i in range(plan.rounds)
    ]


def _step(plan: ExchangePlan, rank: int, of_units: slice, of_deliveries: slice) -> Step:
    units, deliveries = plan.units, plan.deliveries
    reader = units.reader[of_units]
    ends = units.offset[of_units] + aligned(units.nbytes[of_units])
    sections = {int(r): int(ends[reader == r].max()) for r in np.unique(reader)}
    mine = of_units.start + np.flatnonzero(reader == rank)

    unit, to = deliveries.unit[of_deliveries], deliveries.rank[of_deliveries]
    source = units.reader[unit]
    outgoing = np.flatnonzero(source == rank)
    incoming = np.flatnonzero((to == rank) & (source != rank))
    first = np.searchsorted(unit[outgoing], mine).tolist()
    first.append(len(outgoing))
    in_parcel = deliveries.is_parcelled[of_deliveries] & (plan.mode == "all_to_all")
    until = deliveries.offset[of_deliveries] + aligned(deliveries.nbytes[of_deliveries])
    sent = _lengths(to[outgoing], until[outgoing], in_parcel[outgoing] & (to[outgoing] != rank))
    coming = _lengths(source[incoming], until[incoming], in_parcel[incoming])
    parcels, at = {}, sections.get(rank, 0)
    for peer, nbytes in sent.items():
        parcels[peer] = (at, nbytes)
        at += nbytes
    if plan.mode == "all_to_all":
        alone = aligned(deliveries.nbytes[of_deliveries][incoming[~in_parcel[incoming]]])
        taken = sum(coming.values()) + int(alone.sum())
    elif plan.mode == "gather_rounds":
        longest = max(sections.values(), default=0)
        at, taken = longest, longest * plan.size
    else:
        taken = sum(sections.values()) - sections.get(rank, 0)
    return Step(
        units=tuple(mine.tolist()),
        outgoing=tuple((of_deliveries.start + outgoing).tolist()),
        first={u: (first[i], first[i + 1]) for i, u in enumerate(mine.tolist())},
        incoming=tuple((of_deliveries.start + incoming).tolist()),
        sections=sections,
        parcels=parcels,
        coming=coming,
        given_nbytes=at,
        taken_nbytes=taken,
    )


def _lengths(peers: np.ndarray, until: np.ndarray, chosen: np.ndarray) -> dict[int, int]:
    """Length of the parcel of each peer that has one."""
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

    def unit(self, parity: int, offset: int, nbytes: int) -> torch.Tensor:
        """Return where a unit lies."""
        return self._give[parity][offset : offset + nbytes]

    def parcel(self, parity: int, step: Step, rank: int) -> torch.Tensor:
        """Return where the parcel to a rank lies."""
        start, nbytes = step.parcels[rank]
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
    """Each rank is sent what it needs: large ranges as they lie in the unit, all else in one parcel."""

    def __init__(self, plan: ExchangePlan, group: Group, buffers: Buffers, directly: Directly) -> None:
        self._plan, self._group, self._buffers, self._directly = plan, group, buffers, directly

    def move(self, step: Step, parity: int) -> list[Arrival]:
        units, deliveries = self._plan.units, self._plan.deliveries
        sends = [
            (peer, byte_view(self._buffers.parcel(parity, step, peer))) for peer in step.parcels
        ]  # parcels come first in both directions
        for d in step.outgoing:
            if deliveries.rank[d] != self._group.rank and not deliveries.is_parcelled[d]:
                at = int(units.offset[deliveries.unit[d]] + deliveries.start[d])
                data = self._buffers.unit(parity, at, int(deliveries.nbytes[d]))
                sends.append((int(deliveries.rank[d]), byte_view(data)))
        receives, arrivals = self._expect(step)
        self._group.exchange(sends, receives)
        return arrivals

    def _expect(self, step: Step) -> tuple[list[PeerBuffer], list[Arrival]]:
        deliveries, at = self._plan.deliveries, 0
        receives: list[PeerBuffer] = []
        arrivals, parcels = [], {}
        for peer, nbytes in step.coming.items():
            parcels[peer] = self._buffers.take[at : at + nbytes]
            receives.append((peer, byte_view(parcels[peer])))
            at += nbytes
        for d in step.incoming:
            peer, nbytes = int(self._plan.units.reader[deliveries.unit[d]]), int(deliveries.nbytes[d])
            begins = int(deliveries.start[d]) if deliveries.is_dense[d] else None
            if deliveries.is_parcelled[d]:
                offset = int(deliveries.offset[d])
                arrivals.append(Arrival(d, parcels[peer][offset : offset + nbytes], begins))
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
    """What the ways have in common that give whole sections, all units of a reader, to everyone."""

    def __init__(self, plan: ExchangePlan, group: Group, buffers: Buffers) -> None:
        self._plan, self._group, self._buffers = plan, group, buffers

    def _arrivals(self, step: Step, sections: Mapping[int, torch.Tensor]) -> list[Arrival]:
        units, deliveries, arrivals = self._plan.units, self._plan.deliveries, []
        for d in step.incoming:
            unit = int(deliveries.unit[d])
            offset, nbytes = int(units.offset[unit]), int(units.nbytes[unit])
            data = sections[int(units.reader[unit])][offset : offset + nbytes]
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
