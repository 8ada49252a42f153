"""The two exchanges of a distributed optimizer: gradients to their owners, parameters back to everyone.

Both work in place on one bucket of a flat buffer, of which every rank of the axis owns an equal slice. Each
can be started and finished apart, so that the model computes in between.
Collective over the axis; nothing is exchanged over an axis of size 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.training.parallel.collectives import all_gather_single, group_of, reduce_scatter_single
from megackpt.training.parallel.groups import Axis


@dataclass(slots=True)
class BucketReduction:
    """The reduction of a bucket of gradients, under way.

    Attributes:
        bucket: the gradients, `[n]`. Nothing may write to them before it is finished.
        axis: the ranks.
        divisor: of the sum.
        received: what comes from other ranks; None if there are none.
        work: to wait for.
    """

    bucket: Tensor
    axis: Axis
    divisor: int
    received: Tensor | None = None
    work: dist.Work | None = None

    def finish(self) -> None:
        """Wait, and write this rank's slice. Local."""
        if self.received is None or self.work is None:
            if self.divisor != 1:
                self.bucket.div_(self.divisor)
            return
        self.work.wait()
        own_slice = self.bucket.view(self.axis.size, -1)[self.axis.rank]
        total = self.received
        if self.bucket.device.type == "cpu":
            slices = self.received.view(self.axis.size, -1)
            total = slices[0].to(torch.promote_types(self.bucket.dtype, torch.float32))
            for received_slice in slices[1:]:
                total += received_slice
        own_slice.copy_(total.div_(self.divisor))


def start_reduction(bucket: Tensor, axis: Axis, *, divisor: int) -> BucketReduction:
    """Start to write the sum over the axis, divided by `divisor`, into this rank's slice of `bucket`.

    bucket is 1-D, a multiple of `axis.size`. The content of the other slices is undefined afterwards. On CPU
    the ranks are added in rank order, in at least fp32, so that the result does not depend on the backend's
    algorithm. Collective: the ranks of an axis start their reductions and gathers in the same order.
    """
    if axis.size == 1:
        return BucketReduction(bucket, axis, divisor)
    if bucket.device.type == "cpu":
        # Gloo's own reduce-scatter is an all-reduce: twice the volume, and the order of the sum is not ours.
        received = torch.empty_like(bucket)
        work = dist.all_to_all_single(received, bucket, group=group_of(axis), async_op=True)
    else:
        # Not every backend may reduce into its own input.
        received = torch.empty_like(bucket.view(axis.size, -1)[axis.rank])
        work = reduce_scatter_single(received, bucket, group=group_of(axis), async_op=True)
    return BucketReduction(bucket, axis, divisor, received, work)


def reduce_scatter_grads(bucket: Tensor, axis: Axis, *, divisor: int) -> None:
    """Reduce a bucket as `start_reduction` does, and wait for it. Collective."""
    start_reduction(bucket, axis, divisor=divisor).finish()


@dataclass(slots=True)
class BucketGather:
    """The gather of a bucket of parameters, under way.

    Attributes:
        own_slice: this rank's slice, which must exist until it is finished; None if nothing is gathered.
        work: to wait for.
    """

    own_slice: Tensor | None = None
    work: dist.Work | None = None

    def finish(self) -> None:
        """Wait until the bucket has the slices of all ranks. Local."""
        if self.work is not None:
            self.work.wait()


def start_gather(bucket: Tensor, axis: Axis) -> BucketGather:
    """Start to fill `bucket` (1-D, a multiple of `axis.size`) with every rank's own slice. Collective."""
    if axis.size == 1:
        return BucketGather()
    own_slice = bucket.view(axis.size, -1)[axis.rank]
    if bucket.device.type == "cpu":
        own_slice = own_slice.clone()  # gloo does not promise to read its input before it writes its output
    return BucketGather(own_slice, all_gather_single(bucket, own_slice, group=group_of(axis), async_op=True))


def all_gather_slices(bucket: Tensor, axis: Axis) -> None:
    """Gather a bucket as `start_gather` does, and wait for it. Collective."""
    start_gather(bucket, axis).finish()
