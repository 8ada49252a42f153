"""Who reads the bytes of a load: every rank what it needs, or ranks for each other.

`connect_reader` chooses the reader as `LoadOptions.exchange` says. The modules of the exchange are imported
only where it is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from megackpt.comm import AnyGroup, Group, check_group_argument, run_and_all_gather, subgroup
from megackpt.engine.data.read import probe_chunk, read_chunk, read_tensors
from megackpt.engine.loading.prepare import LoadRequest, PreparedLoad, ReadResult
from megackpt.errors import DeclarationError
from megackpt.options import LoadOptions
from megackpt.validation import PhaseTimes

if TYPE_CHECKING:
    from megackpt.engine.loading.exchange import ExchangeReader

Reader: TypeAlias = "DirectReader | ExchangeReader"
"""Has a method `read(prepared)`, which fills the tensors and returns a `ReadResult`, or None if another rank
failed that raises its error itself."""


@dataclass(frozen=True, slots=True)
class DirectReader:
    """Reads on each rank what this rank needs; no rank waits for another."""

    options: LoadOptions

    def read(self, prepared: PreparedLoad) -> ReadResult:
        """Fill the tensors of a load and return the bytes of its objects. Local."""
        plan, began = prepared.plan, time.perf_counter()
        read_tensors(plan.chunks, plan.copies, prepared.tensors, self.options)
        object_bytes = [read_chunk(plan.chunks, row) for row in plan.object_rows]
        return ReadResult(object_bytes, PhaseTimes(read=time.perf_counter() - began))


def connect_reader(request: LoadRequest, prepared: PreparedLoad, group: Group) -> Reader:
    """Return the reader of a load. Collective over the group, unless each rank reads for itself.

    Raises:
        CheckpointError: the ranks that exchange could not be connected; the same on every rank.
    """
    if request.options.exchange == "direct":
        return DirectReader(request.options)
    doing = "connecting the ranks that exchange"
    reader, _ = run_and_all_gather(
        group, lambda: (_connect_exchange(request, prepared, group), b""), doing=doing
    )
    return reader


def _connect_exchange(request: LoadRequest, prepared: PreparedLoad, group: Group) -> Reader:
    """Connect the ranks of the exchange group; allocate buffers for objects before other ranks wait."""
    from megackpt.comm.device_group import DeviceGroup
    from megackpt.engine.loading.exchange import ExchangeRanks, ExchangeReader

    options, plan = request.options, prepared.plan
    devices = None if options.cpu_transfer else DeviceGroup(request.exchange_group)
    group_of_ranks = group if request.exchange_group is None else request.exchange_group
    ranks = ExchangeRanks(
        subgroup(group_of_ranks, timeout_s=options.timeout_s), devices, request.file_readers
    )
    if ranks.group.size == 1:
        return DirectReader(options)
    if request.file_readers is None:  # else only other ranks may have the files, and have checked them
        for row in plan.object_rows:
            probe_chunk(plan.chunks, row)
    lengths = plan.chunks.table.nbytes[plan.object_rows].tolist()
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]
    return ExchangeReader(ranks, options, buffers)


def check_exchange_group(options: LoadOptions, exchange_group: AnyGroup | None) -> None:
    """Check that the exchange group fits the options. Local.

    Raises:
        DeclarationError: it does not.
    """
    if options.exchange == "direct" and exchange_group is not None:
        raise DeclarationError(
            "exchange_group is given, and LoadOptions.exchange is 'direct': every rank reads by itself, and "
            "no group is needed. Choose how to exchange, 'all_to_all' for instance, or leave the group out."
        )
    if exchange_group is not None:
        check_group_argument("exchange_group", exchange_group)
    if not options.cpu_transfer:
        from megackpt.comm.device_group import DeviceGroup

        DeviceGroup(exchange_group)  # raises an error if the group has no backend for devices
