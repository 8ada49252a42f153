"""The two exchanges of a distributed optimizer: gradients to their owners, parameters back to everyone.

Both work in place on one bucket of a flat buffer, of which every rank of the axis owns an equal slice.
Collective over the axis; nothing is exchanged over an axis of size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel.groups import Axis

# torch 2.13 renamed these two and warns about the old names; torch 2.6 knows only those.
_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def reduce_scatter_grads(bucket: Tensor, axis: Axis, *, divisor: int) -> None:
    """Write the sum over the axis, divided by `divisor`, into this rank's slice of `bucket`. Collective.

    bucket is 1-D, a multiple of `axis.size`. The content of the other slices is undefined afterwards. On CPU
    the ranks are added in rank order, in at least fp32, so that the result does not depend on the backend's
    algorithm.
    """
    if axis.size == 1:
        if divisor != 1:
            bucket.div_(divisor)
        return
    own_slice = bucket.view(axis.size, -1)[axis.rank]
    if bucket.device.type == "cpu":
        # Gloo's own reduce-scatter is an all-reduce: twice the volume, and the order of the sum is not ours.
        received = torch.empty_like(bucket)
        dist.all_to_all_single(received, bucket, group=_group(axis))
        slices = received.view(axis.size, -1)
        total = slices[0].to(torch.promote_types(bucket.dtype, torch.float32))
        for received_slice in slices[1:]:
            total += received_slice
        own_slice.copy_(total.div_(divisor))
    else:
        reduced = torch.empty_like(own_slice)  # not every backend may reduce into its own input
        _reduce_scatter_single(reduced, bucket, group=_group(axis))
        own_slice.copy_(reduced.div_(divisor))


def all_gather_slices(bucket: Tensor, axis: Axis) -> None:
    """Fill `bucket` (1-D, a multiple of `axis.size`) with every rank's own slice of it. Collective."""
    if axis.size == 1:
        return
    own_slice = bucket.view(axis.size, -1)[axis.rank]
    if bucket.device.type == "cpu":
        own_slice = own_slice.clone()  # gloo does not promise to read its input before it writes its output
    _all_gather_single(bucket, own_slice, group=_group(axis))


def _group(axis: Axis) -> dist.ProcessGroup:
    if axis.group is None:
        raise DeclarationError(
            f"an optimizer step over data-parallel ranks {axis.ranks} was called, but these groups were "
            f"made without communication (ParallelGroups.offline). Make them with ParallelGroups.create on "
            f"all ranks to train.",
            rank=axis.ranks[axis.rank],
        )
    return axis.group
