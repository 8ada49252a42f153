"""Collectives that autograd can differentiate, over one `Axis`.

Each function is a forward operation paired with the operation that carries gradients back. Which pair is
right depends on the computation before and after it: the same on all ranks (replicated), or a part of it on
each rank (parallel).

    function                 forward                   backward                  before -> after
    copy_to                  identity                  sum over ranks            replicated -> parallel
    copy_to_neighbours       identity                  sum over neighbours       equal on them -> parallel
    reduce_from              sum over ranks            identity                  parallel -> replicated
    scatter_to               own slice of last dim     gather last dim           replicated -> parallel
    gather_from              gather last dim           own slice of last dim     parallel -> replicated
    scatter_sequence         own slice of dim 0        gather dim 0              replicated -> sequence
    collect_sequence         gather dim 0              own slice of dim 0        sequence -> replicated
    gather_sequence          gather dim 0              sum, own slice of dim 0   sequence -> parallel
    reduce_scatter_sequence  sum, own slice of dim 0   gather dim 0              parallel -> sequence
    exchange_rows            rows to their ranks       rows back                 own rows -> others' rows
    gather_rows              join rows                 sum, own rows             own rows -> parallel
    reduce_scatter_rows      sum, own rows             join rows                 parallel -> own rows
    collect_rows             join rows                 own rows                  own rows -> replicated
    scatter_rows             own rows                  join rows                 replicated -> own rows

The last five are for rows of dim 0 of which each rank may have another number, or none.

All are collective over the axis; over an axis of size 1 they return their input. None changes its input.

Source: Shoeybi et al. 2019, section 3 (f and g are `copy_to` and `reduce_from`); Korthikanti et al. 2022,
section 4.2.2 (g and g-bar are `gather_sequence` and `reduce_scatter_sequence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel.groups import Axis

Exchange = Callable[[Tensor, Axis], Tensor]

# torch 2.13 renamed these two and warns about the old names; torch 2.6 knows only those.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Return `x` for computation that each rank does a part of; gradients are summed. Collective."""
    return _exchange(x, axis, _identity, all_reduce)


def copy_to_neighbours(x: Tensor, axis: Axis, rows: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return `x` for computation that each rank does by itself; some rows are shared with neighbours.

    The gradients of shared rows are summed over the neighbours, and are equal on them bit for bit. Collective
    over the whole axis, whose size is a multiple of every `copies`.

    Args:
        x: the tensor.
        axis: the ranks.
        rows: `(start, stop, copies)` along dim 0: `copies` neighbours have the same `x[start:stop]`.
    """
    return _exchange(x, axis, _identity, partial(_sum_over_neighbours, rows=rows)) if rows else x


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum the partial results `x` of the ranks; gradients pass unchanged. Collective."""
    return _exchange(x, axis, all_reduce, _identity)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's slice `[..., n/size]` of an `x` that is equal on all ranks. Collective."""
    return _exchange(x, axis, _split_last, _gather_last)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Join `[..., n/size]` of the ranks to `[..., n]`, for computation equal on all ranks. Collective."""
    return _exchange(x, axis, _gather_last, _split_last)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's slice `[s/size, ...]` of an `x` that is equal on all ranks. Collective."""
    return _exchange(x, axis, _split_first, _gather_first)


def collect_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Join `[s/size, ...]` of the ranks to `[s, ...]`, for computation equal on all ranks. Collective.

    Unlike in `gather_sequence`, each rank has the whole gradient already: it is sliced and not summed.
    """
    return _exchange(x, axis, _gather_first, _split_first)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Join `[s/size, ...]` of the ranks, for computation that each rank does a part of. Collective."""
    return _exchange(x, axis, _gather_first, _reduce_scatter_first)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum the partial results `[s, ...]` of the ranks and keep this rank's `[s/size, ...]`. Collective."""
    return _exchange(x, axis, _reduce_scatter_first, _gather_first)


def exchange_rows(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send the first `sent[0]` rows to the first rank of the axis, the next to the second, .... Collective.

    Returns the rows that this rank gets, `received[i]` from the i-th rank, in the order of the ranks.
    """
    there = partial(_all_to_all, sent=sent, received=received)
    back = partial(_all_to_all, sent=received, received=sent)
    return _exchange(x, axis, there, back)


def gather_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Join the `counts[i]` rows of the ranks, for computation that each rank does a part of. Collective."""
    return _exchange(x, axis, partial(_join_rows, counts=counts), partial(_sum_of_own_rows, counts=counts))


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Sum the partial results of the ranks and keep this rank's `counts[rank]` rows. Collective.

    The sum is in the order of the ranks, and so the same in every run.
    """
    return _exchange(x, axis, partial(_sum_of_own_rows, counts=counts), partial(_join_rows, counts=counts))


def collect_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Join the `counts[i]` rows of the ranks, for computation equal on all ranks. Collective."""
    return _exchange(x, axis, partial(_join_rows, counts=counts), partial(_own_rows, counts=counts))


def scatter_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Return this rank's `counts[rank]` rows of an `x` that is equal on all ranks. Collective."""
    return _exchange(x, axis, partial(_own_rows, counts=counts), partial(_join_rows, counts=counts))


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return `x` reduced over the axis, outside autograd. Collective; `x` is not changed."""
    if axis.size == 1:
        return x
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group_of(axis))
    return result


class _Exchange(torch.autograd.Function):
    """An exchange whose gradient is another exchange over the same axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.axis, ctx.backward_exchange = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_exchange(grads[0], ctx.axis), None, None, None


def _exchange(x: Tensor, axis: Axis, forward: Exchange, backward: Exchange) -> Tensor:
    if axis.size == 1:
        return x
    return cast(Tensor, _Exchange.apply(x, axis, forward, backward))  # type: ignore[no-untyped-call]


def group_of(axis: Axis) -> dist.ProcessGroup:
    """Return the process group of an axis. Local.

    Raises:
        DeclarationError: the groups were made without communication.
    """
    if axis.group is None:
        raise DeclarationError(
            f"a collective over ranks {axis.ranks} was called, but these groups were made without "
            f"communication (ParallelGroups.offline). Make them with ParallelGroups.create on all ranks to "
            f"run and train the model.",
            rank=axis.ranks[axis.rank],
        )
    return axis.group


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)  # a new tensor object: a function of autograd must not return its input itself


def _sum_over_neighbours(x: Tensor, axis: Axis, rows: Sequence[tuple[int, int, int]]) -> Tensor:
    """Sum rows over neighbouring ranks, by an all-reduce over the axis: neighbours have no process group."""
    result = x.clone(memory_format=torch.contiguous_format)
    for start, stop, copies in rows:
        # One entry for each set of neighbours; all other ranks add zeros to it.
        sums = x.new_zeros((axis.size // copies, stop - start, *x.shape[1:]))
        sums[axis.rank // copies] = x[start:stop]
        dist.all_reduce(sums, group=group_of(axis))
        result[start:stop] = sums[axis.rank // copies]
    return result


def _split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if x.shape[dim] % axis.size:
        raise DeclarationError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {axis.size} equal slices, "
            f"for ranks {axis.ranks}. Choose a size (sequence length, features) that is a multiple of "
            f"{axis.size}.",
            rank=axis.ranks[axis.rank],
        )
    return x.chunk(axis.size, dim=dim)[axis.rank].contiguous()


def _gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    leading = x.movedim(dim, 0).contiguous()  # the collective joins along dim 0 only
    joined = leading.new_empty((leading.shape[0] * axis.size, *leading.shape[1:]))
    all_gather_single(joined, leading, group=group_of(axis))
    return joined.movedim(0, dim).contiguous()


def _reduce_scatter_first(x: Tensor, axis: Axis) -> Tensor:
    own_slice = torch.empty_like(_split(x, axis, 0))  # also checks that the dim divides
    reduce_scatter_single(own_slice, x.contiguous(), group=group_of(axis))
    return own_slice


def _split_last(x: Tensor, axis: Axis) -> Tensor:
    return _split(x, axis, -1)


def _gather_last(x: Tensor, axis: Axis) -> Tensor:
    return _gather(x, axis, -1)


def _split_first(x: Tensor, axis: Axis) -> Tensor:
    return _split(x, axis, 0)


def _gather_first(x: Tensor, axis: Axis) -> Tensor:
    return _gather(x, axis, 0)


def _all_to_all(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group_of(axis))
    return result


def _join_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    # An all-gather would need as many rows on every rank.
    return _all_to_all(torch.cat([x] * axis.size), axis, sent=[len(x)] * axis.size, received=counts)


def _sum_of_own_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    own = counts[axis.rank]
    parts = _all_to_all(x, axis, sent=counts, received=[own] * axis.size)
    return parts.view(axis.size, own, *x.shape[1:]).sum(dim=0)


def _own_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    return torch.split_with_sizes(x, list(counts))[axis.rank].contiguous()
