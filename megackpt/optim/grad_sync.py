"""Sums of gradients over the ranks of one model replica, before data-parallel reduction, and their norm.

The attributes of a parameter (see `megackpt.parallel.attributes`) decide whether its gradient is summed over
tp or over the two ends of the pipeline, and whether it counts in the global norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.geometry import View
from megackpt.mapping.layout import chunks_of_view
from megackpt.optim.ranges import FlatRange
from megackpt.parallel.attributes import ParameterFlag, copied_rows, is_marked
from megackpt.parallel.collectives import all_reduce
from megackpt.parallel.groups import Axis, ParallelGroups


def sum_over_model_ranks(params: Sequence[Parameter], groups: ParallelGroups) -> None:
    """Sum `main_grad` over the ranks of one model replica that each have a part of the sum. Collective.

    Those are tp for sequence-parallel parameters, and both ends of the pipeline for a tied embedding. All
    ranks of an axis must have their marked parameters in the same order.
    """
    for axis, flag in _sums(groups):
        _sum_in_place([_main_grad(p) for p in params if is_marked(p, flag)], axis)


def touched_on_any_rank(
    params: Sequence[Parameter], touched: Sequence[bool], groups: ParallelGroups
) -> tuple[bool, ...]:
    """Return for each parameter whether any of the ranks that share its gradient has one. Collective.

    A parameter that no rank touched is not updated, as torch does with `grad=None`. One that only some ranks
    touched (an expert that got no tokens on the others) must be updated by all of them.
    """
    if not params:
        return ()
    flags = torch.tensor(touched, dtype=torch.int32, device=params[0].device)
    for axis, flag in _sums(groups):
        marked = torch.tensor([is_marked(p, flag) for p in params], device=flags.device)
        if axis.size > 1 and bool(marked.any()):
            flags[marked] = all_reduce(flags[marked], axis)
    any_rank = all_reduce(flags, groups.dp)
    # `tolist` waits for the device. If this rank touched everything, as is usual, the result is known.
    return tuple(touched) if all(touched) else tuple(bool(flag) for flag in any_rank.tolist())


def global_grad_norm(
    grads: Iterable[tuple[Parameter, FlatRange, Tensor]],
    groups: ParallelGroups,
    *,
    axes: Sequence[Axis],
    device: torch.device,
) -> Tensor:
    """Return the L2 norm of the whole model's gradient, a 0-dim fp64 tensor equal on all ranks. Collective.

    Each parameter of the model counts once: one that tp ranks replicate counts on tp rank 0 only, the last
    stage's copy of a tied embedding not at all, and of rows that neighbours in tp share, those of the first
    rank. Squares are summed in fp64, so that the norm, and with it a clipped step, depends on the parallel
    layout in its last bits at most.

    Args:
        grads: of this rank: a parameter, a range of its elements and the gradient of that range.
        groups: the ranks around this one.
        axes: the axes over which these ranges differ.
        device: where the norm is computed and exchanged.

    Source: `torch.nn.utils.clip_grad_norm_`, over all ranks.
    """
    squares = [
        torch.linalg.vector_norm(counted, dtype=torch.float64).square().to(device)
        for param, flat_range, grad in grads
        if _counts(param, groups.tp)
        for counted in _without_copies(param, flat_range, grad)
    ]
    zero = torch.zeros((), dtype=torch.float64, device=device)  # a rank may own nothing that counts
    total = torch.stack([zero, *squares]).sum()
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients with which their norm is at most max_norm; at most 1.

    Source: `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _sums(groups: ParallelGroups) -> tuple[tuple[Axis, ParameterFlag], ...]:
    return (groups.tp, "sequence_parallel"), (groups.embedding, "shared_embedding")


def _counts(param: Parameter, tp: Axis) -> bool:
    return not is_marked(param, "is_duplicate") and (
        is_marked(param, "tensor_model_parallel") or tp.rank == 0
    )


def _without_copies(param: Parameter, flat_range: FlatRange, grad: Tensor) -> list[Tensor]:
    """Return views of the elements of a gradient that no other rank counts; see `copied_rows`."""
    copied = copied_rows(param)
    if not copied:
        return [grad]
    dim = copied[0].dim
    # The rows between the copied ranges, of which each is a view of the parameter.
    edges = [0, *(edge for rows in copied for edge in (rows.start, rows.stop)), param.shape[dim]]
    whole = View.of(tuple(param.shape))
    kept = [whole.narrow(dim, a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    flat = grad.reshape(-1)
    slices = [
        owned_slice.data for view in kept for owned_slice in chunks_of_view(view, flat, flat_range.as_slice())
    ]
    return [data for data in slices if data is not None]


def _main_grad(param: Parameter) -> Tensor:
    return cast(Tensor, param.main_grad)  # type: ignore[attr-defined]  # set by ParamGradBuffer


def _sum_in_place(grads: Sequence[Tensor], axis: Axis) -> None:
    if axis.size == 1 or not grads:
        return
    # Norm weights are small and many: one exchange for each dtype instead of one for each parameter.
    for dtype in dict.fromkeys(g.dtype for g in grads):
        same_dtype = [g for g in grads if g.dtype == dtype]
        summed = all_reduce(torch.cat([g.reshape(-1) for g in same_dtype]), axis)
        totals = torch.split(summed, [g.numel() for g in same_dtype])
        for grad, total in zip(same_dtype, totals, strict=True):
            grad.copy_(total.view(grad.shape))
