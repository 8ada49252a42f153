"""Sharded optimizer state brought together on the first data-parallel rank, for checkpoints of few files.

Owns that exchange only; what is gathered, and how the result is declared, is the optimizer's affair.

Source: Megatron-Core `DistributedOptimizer`, `dp_zero_gather_scatter`; here whole parameters come out, which
reshard to any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.optim.ranges import Span
from megackpt.parallel.groups import Axis


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A range of the flattening of one state of one parameter.

    Attributes:
        position: of the parameter among all of the optimizer's.
        state: name of the state, e.g. `exp_avg`.
        owned: the range.
        data: its elements, 1-D.
    """

    position: int
    state: str
    owned: Span
    data: Tensor


def gather_parts(mine: Sequence[FlatPart], axis: Axis) -> list[FlatPart]:
    """Return on the first rank of the axis the parts of all its ranks, in host memory; nothing on others.

    Collective over the axis. The first rank needs memory for all of them; ranks send one after the other.

    Raises:
        DeclarationError: the groups were made without communication.
    """
    if axis.size == 1:
        return list(mine)
    if axis.group is None:
        raise DeclarationError(
            "Gathering optimizer state needs groups that communicate. Make them with ParallelGroups.create."
        )
    described = [(p.position, p.state, p.owned.start, p.owned.stop, p.data.dtype) for p in mine]
    everyone: list[list[tuple[int, str, int, int, torch.dtype]]] | None = (
        [[] for _ in axis.ranks] if axis.is_first else None
    )
    dist.gather_object(described, everyone, dst=axis.ranks[0], group=axis.group)
    if everyone is None:
        for part in mine:
            dist.send(part.data.contiguous(), axis.ranks[0], group=axis.group)
        return []
    gathered = [FlatPart(p.position, p.state, p.owned, p.data.cpu()) for p in mine]
    for source, parts in zip(axis.ranks[1:], everyone[1:], strict=True):
        for position, state, start, stop, dtype in parts:
            device = mine[0].data.device if mine else torch.device("cpu")
            received = torch.empty(stop - start, dtype=dtype, device=device)
            dist.recv(received, source, group=axis.group)
            gathered.append(FlatPart(position, state, Span(start, stop), received.cpu()))
    return gathered


def join_parts(parts: Sequence[FlatPart], numels: Sequence[int]) -> dict[tuple[int, str], Tensor]:
    """Return each state of each parameter as one 1-D tensor, by position and name. Local.

    numels are the sizes of all parameters of the optimizer.
    """
    whole: dict[tuple[int, str], Tensor] = {}
    for part in parts:
        named = (part.position, part.state)
        if named not in whole:
            whole[named] = torch.empty(numels[part.position], dtype=part.data.dtype)
        whole[named][part.owned.as_slice()] = part.data
    return whole
