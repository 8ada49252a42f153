"""Gathers sharded optimizer state on the first of the ranks that share it, for checkpoints of few files.

The optimizer decides which state is gathered and how the result is declared.

Source: Megatron-Core `DistributedOptimizer`, `dp_zero_gather_scatter`. Here the result is whole parameters,
which reshard to any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.optim.ranges import FlatRange
from megackpt.training.parallel.groups import Axis


@dataclass(frozen=True, slots=True)
class StateRange:
    """A range of one state of one parameter, flattened.

    Attributes:
        position: of the parameter among all of the optimizer's.
        state: name of the state, e.g. `exp_avg`.
        flat_range: the range.
        data: its elements, 1-D.
    """

    position: int
    state: str
    flat_range: FlatRange
    data: Tensor


def gather_states(own: Sequence[StateRange], axis: Axis) -> list[StateRange]:
    """Gather the ranges of all ranks of an axis on its first rank. Collective over the axis.

    Returns them in host memory on the first rank, and an empty list on the others. The first rank needs
    memory for all of them; the others send one after the other.

    Raises:
        DeclarationError: the groups were made without communication.
    """
    if axis.size == 1:
        return list(own)
    if axis.group is None:
        raise DeclarationError(
            "Gathering optimizer state needs groups that communicate. Make them with ParallelGroups.create."
        )
    all_descriptions = _gather_descriptions(own, axis)
    if all_descriptions is None:
        for state in own:
            dist.send(state.data.contiguous(), axis.ranks[0], group=axis.group)
        return []
    gathered = [StateRange(p.position, p.state, p.flat_range, p.data.cpu()) for p in own]
    device = own[0].data.device if own else torch.device("cpu")
    for source, described in zip(axis.ranks[1:], all_descriptions[1:], strict=True):
        gathered += _receive_ranges(described, source, axis, device)
    return gathered


_Description: TypeAlias = tuple[int, str, int, int, torch.dtype]
"""Position, state, start, stop and dtype of a range, which follows as a message without a head."""


def _gather_descriptions(own: Sequence[StateRange], axis: Axis) -> list[list[_Description]] | None:
    """Gather the descriptions of all ranks' ranges on the first rank; None on others. Collective."""
    descriptions = [(p.position, p.state, p.flat_range.start, p.flat_range.stop, p.data.dtype) for p in own]
    gathered: list[list[_Description]] | None = [[] for _ in axis.ranks] if axis.is_first else None
    dist.gather_object(descriptions, gathered, dst=axis.ranks[0], group=axis.group)
    return gathered


def _receive_ranges(
    described: Sequence[_Description], source: int, axis: Axis, device: torch.device
) -> Iterator[StateRange]:
    """Yield the ranges that a rank sends, in the order of its description."""
    for position, name, start, stop, dtype in described:
        received = torch.empty(stop - start, dtype=dtype, device=device)
        dist.recv(received, source, group=axis.group)
        yield StateRange(position, name, FlatRange(start, stop), received.cpu())


def join_states(ranges: Sequence[StateRange], numels: Sequence[int]) -> dict[tuple[int, str], Tensor]:
    """Return each state of each parameter as one 1-D tensor, by position and name. Local.

    Args:
        ranges: of all ranks; those of one state cover it.
        numels: the sizes of all parameters of the optimizer, in elements.
    """
    whole: dict[tuple[int, str], Tensor] = {}
    for state in ranges:
        named = (state.position, state.state)
        if named not in whole:
            whole[named] = torch.empty(numels[state.position], dtype=state.data.dtype)
        whole[named][state.flat_range.as_slice()] = state.data
    return whole
