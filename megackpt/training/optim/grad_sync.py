"""Sums of gradients over the ranks of one model replica, before they are averaged, and their global norm.

The attributes of a parameter (see `megackpt.training.parallel.attributes`) decide whether its gradient is
summed over tp or over the two ends of the pipeline, and whether it counts in the global norm. For a parameter
of experts, tp is etp everywhere.

A gradient is the mean over the samples of dp x cp ranks: a dense one is summed over these ranks and divided
by their number. Experts get the tokens of all ranks of their etp x ep group, of which several are dp or cp
ranks. So the sum over edp alone is already the sum over all tokens, and it is divided by the same dp x cp:
a mean over edp would be too large. This requires that each token reaches each slice of its experts once:
where tp is larger than 1, every tp rank dispatches its own part of the sequence.

Source: Megatron-Core `DistributedDataParallel`, `expert_gradient_scaling_factor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities.layout import chunks_of_view
from megackpt.plans.geometry import View
from megackpt.training.optim.ranges import FlatRange
from megackpt.training.parallel.attributes import ParameterFlag, copied_rows, is_marked
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import Axis, ParallelGroups


def groups_of(param: Tensor, groups: ParallelGroups) -> ParallelGroups:
    """Return the ranks around this one as `param` sees them: `groups.experts` for one of experts. Local."""
    return groups.experts if is_marked(param, "expert_parallel") else groups


def sum_over_model_ranks(params: Sequence[Parameter], groups: ParallelGroups) -> None:
    """Sum `main_grad` over the ranks of one model replica that each have a part of the sum. Collective.

    Those are tp (etp for experts) for sequence-parallel parameters, and both ends of the pipeline for a tied
    embedding. All ranks of an axis must have their marked parameters in the same order.
    """
    for axis, marked in _sums(params, groups):
        _sum_in_place([_main_grad(params[i]) for i in marked], axis)


def is_summed_over_model_ranks(param: Parameter, groups: ParallelGroups) -> bool:
    """Return whether `sum_over_model_ranks` exchanges the gradient of `param`. Local."""
    return any(marked and axis.size > 1 for axis, marked in _sums([param], groups))


def touched_on_any_rank(
    params: Sequence[Parameter], touched: Sequence[bool], groups: ParallelGroups
) -> tuple[bool, ...]:
    """Return for each parameter whether any of the ranks that share its gradient has one. Collective.

    A parameter that no rank touched is not updated, as torch does with `grad=None`. One that only some ranks
    touched must be updated by all of them. The experts of a stacked weight are one parameter that ep cuts:
    if any expert got a token, the others have a gradient of zero, on all ranks.
    """
    if not params:
        return ()
    flags = torch.tensor(touched, dtype=torch.int32, device=params[0].device)
    sums = [*_sums(params, groups), *_sharing_ranks(params, groups)]
    for axis, members in sums:
        if axis.size > 1 and members:
            index = torch.tensor(members, device=flags.device)
            flags[index] = all_reduce(flags[index], axis)
    # `tolist` waits for the device. If this rank touched everything, as is usual, the result is known.
    return tuple(touched) if all(touched) else tuple(bool(flag) for flag in flags.tolist())


def global_grad_norm(
    grads: Iterable[tuple[Parameter, FlatRange, Tensor]],
    groups: ParallelGroups,
    *,
    has_experts: bool,
    is_sharded: bool,
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
        has_experts: whether this stage has parameters of experts; equal on all ranks of the stage.
        is_sharded: whether the ranges differ over the ranks with equal parameters (dp_cp, or edp).
        device: where the norm is computed and exchanged.

    Source: `torch.nn.utils.clip_grad_norm_`, over all ranks.
    """
    # Summed apart: the ranks over which the gradients of experts differ cut across those of dense ones.
    squares: dict[bool, list[Tensor]] = {False: [], True: []}
    tp = {False: groups.tp, True: groups.etp}
    for param, flat_range, grad in grads:
        is_expert = is_marked(param, "expert_parallel")
        if _counts(param, tp[is_expert]):
            squares[is_expert] += [
                torch.linalg.vector_norm(counted, dtype=torch.float64).square().to(device)
                for counted in _without_copies(param, flat_range, grad)
            ]
    cut = [groups.dp_cp] if is_sharded else []
    total = _sum_over(squares[False], [*cut, groups.tp], device)
    if has_experts:
        cut = [groups.edp] if is_sharded else []
        total = total + _sum_over(squares[True], [*cut, groups.etp, groups.ep], device)
    return all_reduce(total, groups.pp).sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients with which their norm is at most max_norm; at most 1.

    Source: `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _sums(params: Sequence[Parameter], groups: ParallelGroups) -> list[tuple[Axis, list[int]]]:
    """Return the axes over which ranks have parts of gradients, and the indices of these parameters."""
    summed: tuple[tuple[Axis, ParameterFlag, bool], ...] = (
        (groups.tp, "sequence_parallel", False),
        (groups.etp, "sequence_parallel", True),
        (groups.embedding, "shared_embedding", False),
    )
    is_expert = [is_marked(param, "expert_parallel") for param in params]
    return [
        (axis, [i for i, p in enumerate(params) if is_marked(p, flag) and is_expert[i] == of_experts])
        for axis, flag, of_experts in summed
    ]


def _sharing_ranks(params: Sequence[Parameter], groups: ParallelGroups) -> list[tuple[Axis, list[int]]]:
    """Return the axes over which data is spread, and the indices of the parameters that share it."""
    of_experts = [index for index, param in enumerate(params) if is_marked(param, "expert_parallel")]
    stacked = [index for index in of_experts if is_marked(params[index], "stacked_experts")]
    dense = sorted(set(range(len(params))) - set(of_experts))
    return [(groups.dp_cp, dense), (groups.edp, of_experts), (groups.etp, stacked), (groups.ep, stacked)]


def _sum_over(squares: Sequence[Tensor], axes: Sequence[Axis], device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=device)  # a rank may own nothing that counts
    total = torch.stack([zero, *squares]).sum()
    for axis in axes:
        total = all_reduce(total, axis)
    return total


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
    # The rows between the copied ranges; each is a view of the parameter.
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
