"""Gradients that ranks of one model replica must agree on before data-parallel reduction, and their norm.

Owns what the attributes of a parameter mean for its gradient (see `megackpt.parallel.attributes`): sums
over tp and over the two ends of the pipeline, and which parameters count in the global norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.geometry import View
from megackpt.mapping.views import chunks_of_view
from megackpt.optim.ranges import Span
from megackpt.parallel.attributes import ParameterFlag, copied_rows, is_marked
from megackpt.parallel.collectives import all_reduce
from megackpt.parallel.groups import Axis, ParallelGroups


def sum_over_model_ranks(params: Sequence[Parameter], groups: ParallelGroups) -> None:
    """Sum `main_grad` over the ranks of one model replica that each have a part of it. Collective.

    Those are tp for sequence-parallel parameters, and both ends of the pipeline for a tied embedding.
    Every rank of an axis must hold its marked parameters in the same order.
    """
    for axis, flag in _sums(groups):
        _sum_in_place([_main_grad(p) for p in params if is_marked(p, flag)], axis)


def agree_on_touched(
    params: Sequence[Parameter], touched: Sequence[bool], groups: ParallelGroups
) -> tuple[bool, ...]:
    """Say for each parameter whether any rank that takes part in its gradient has one. Collective.

    A parameter that no rank touched is left alone, as torch does with `grad=None`; one that only some ranks
    touched (an expert without tokens here) must still be updated by all of them.
    """
    if not params:
        return ()
    flags = torch.tensor(touched, dtype=torch.int32, device=params[0].device)
    for axis, flag in _sums(groups):
        marked = torch.tensor([is_marked(p, flag) for p in params], device=flags.device)
        if axis.size > 1 and bool(marked.any()):
            flags[marked] = all_reduce(flags[marked], axis)
    agreed = all_reduce(flags, groups.dp)
    # Reading waits for the device; where this rank touched everything, as is usual, the answer is known.
    return tuple(touched) if all(touched) else tuple(bool(flag) for flag in agreed.tolist())


def global_grad_norm(
    grads: Iterable[tuple[Parameter, Span, Tensor]],
    groups: ParallelGroups,
    *,
    axes: Sequence[Axis],
    device: torch.device,
) -> Tensor:
    """Return the L2 norm of the whole model's gradient, a 0-dim fp64 tensor equal on all ranks. Collective.

    grads are this rank's pieces: a parameter, a range of its flattening and the gradient of that range. Each
    true parameter counts once: one that tp ranks replicate on tp rank 0 only, the last stage's copy of a tied
    embedding not at all, of rows that neighbours in tp hold in common those of the first one. Squares are
    summed in fp64, so that the norm, and with it a clipped step, depends on the parallel layout in its last
    bits at most. axes are those over which the pieces differ; device is where the norm is computed and
    exchanged.

    Source: `torch.nn.utils.clip_grad_norm_`, over all ranks.
    """
    squares = [
        torch.linalg.vector_norm(counted, dtype=torch.float64).square().to(device)
        for param, owned, grad in grads
        if _counts(param, groups.tp)
        for counted in _without_copies(param, owned, grad)
    ]
    zero = torch.zeros((), dtype=torch.float64, device=device)  # a rank may own nothing that counts
    total = torch.stack([zero, *squares]).sum()
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients are multiplied by so that their norm is at most max_norm; at most 1.

    Source: `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _sums(groups: ParallelGroups) -> tuple[tuple[Axis, ParameterFlag], ...]:
    return (groups.tp, "sequence_parallel"), (groups.embedding, "shared_embedding")


def _counts(param: Parameter, tp: Axis) -> bool:
    return not is_marked(param, "is_duplicate") and (
        is_marked(param, "tensor_model_parallel") or tp.rank == 0
    )


def _without_copies(param: Parameter, owned: Span, grad: Tensor) -> list[Tensor]:
    """Return the elements of a piece of a gradient that this rank does not hold as a copy; views."""
    copied = copied_rows(param)
    if not copied:
        return [grad]
    dim = copied[0].dim
    # The rows between the copied ranges, of which each is a view of the parameter.
    edges = [0, *(edge for rows in copied for edge in (rows.start, rows.stop)), param.shape[dim]]
    whole = View.of(tuple(param.shape))
    kept = [whole.narrow(dim, a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    flat = grad.reshape(-1)
    pieces = [piece.data for view in kept for piece in chunks_of_view(view, flat, owned.as_slice())]
    return [data for data in pieces if data is not None]


def _main_grad(param: Parameter) -> Tensor:
    return cast(Tensor, param.main_grad)  # type: ignore[attr-defined]  # set by ParamGradBuffer


def _sum_in_place(grads: Sequence[Tensor], axis: Axis) -> None:
    if axis.size == 1 or not grads:
        return
    # Norm weights are small and many: one exchange for each dtype instead of one for each parameter.
    for dtype in dict.fromkeys(g.dtype for g in grads):
        alike = [g for g in grads if g.dtype == dtype]
        summed = all_reduce(torch.cat([g.reshape(-1) for g in alike]), axis)
        for grad, total in zip(alike, torch.split(summed, [g.numel() for g in alike]), strict=True):
            grad.copy_(total.view(grad.shape))
