"""Before ranks read for each other: checks the group that they give, and connects its ranks."""

from __future__ import annotations

import torch

from megackpt.comm import AnyGroup, Group, errors_on_all_ranks
from megackpt.comm.subgroups import DeviceGroup, check_group_argument, subgroup
from megackpt.engine.data.read import probe_chunk
from megackpt.engine.loading.exchange import ExchangeRanks, ExchangeReader
from megackpt.engine.loading.prepared_load import PreparedLoad
from megackpt.engine.loading.source import LoadRequest
from megackpt.errors import DeclarationError
from megackpt.options import LoadOptions


def check_exchange_group(options: LoadOptions, exchange_group: AnyGroup | None, *, has_map: bool) -> None:
    """Check that the exchange group fits the options. Local.

    Raises:
        DeclarationError: it does not.
    """
    is_direct = options.exchange == "direct" or (options.exchange == "auto" and not has_map)
    if is_direct and exchange_group is not None:
        raise DeclarationError(
            f"exchange_group is given, but with LoadOptions.exchange={options.exchange!r} every rank reads "
            f"for itself. Choose a mode of exchange, such as 'all_to_all', or leave the group out."
        )
    if exchange_group is not None:
        check_group_argument("exchange_group", exchange_group)
    if not options.cpu_transfer:
        DeviceGroup(exchange_group)  # raises an error if the group has no backend for devices


def connect_exchange(request: LoadRequest, prepared: PreparedLoad, group: Group) -> ExchangeReader | None:
    """Connect the ranks of the exchange group; None if this rank is alone in it. Collective over the group.

    Raises:
        CheckpointError: the ranks could not be connected; the same on every rank.
    """
    with errors_on_all_ranks(group, "connecting the ranks that exchange"):
        reader = _connect(request, prepared, group)
    return reader


def _connect(request: LoadRequest, prepared: PreparedLoad, group: Group) -> ExchangeReader | None:
    """Connect the ranks of the exchange group; allocate buffers for objects before other ranks wait."""
    options, plan = request.options, prepared.plan
    devices = None if options.cpu_transfer else DeviceGroup(request.exchange_group)
    group_of_ranks = group if request.exchange_group is None else request.exchange_group
    ranks = ExchangeRanks(
        subgroup(group_of_ranks, timeout_s=options.timeout_s), devices, request.file_readers
    )
    if ranks.group.size == 1:
        return None
    if request.file_readers is None:  # else only other ranks may have the files, and have checked them
        for row in plan.object_rows:
            probe_chunk(plan.chunks, row)
    lengths = plan.chunks.table.nbytes[plan.object_rows].tolist()
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]
    return ExchangeReader(ranks, options, buffers)
