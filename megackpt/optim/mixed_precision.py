"""MixedPrecisionOptimizer: whole fp32 master weights on every data-parallel rank.

Owns what "whole" means: every rank updates all of its parameters and declares whole states, replicated over
dp. It stores under the same keys as `DistributedOptimizer`, so that each loads what the other saved. The
order of a step is `master_optimizer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from megackpt.mapping import ShardedBase, ShardedTensor
from megackpt.optim.collectives import all_gather_slices, reduce_scatter_mean
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.optim.owned import Slot
from megackpt.optim.ranges import BufferLayout, Span
from megackpt.optim.sharded_state import (
    ParamEntity,
    make_sharded_optimizer_tensor,
    make_sharded_scalar,
    replica_of,
)
from megackpt.optim.state_init import Build, ProbeKind
from megackpt.parallel.groups import Axis


class MixedPrecisionOptimizer(MasterOptimizer):
    """Any torch optimizer whose state has the shape of the parameters, on whole master weights.

    Takes what `DistributedOptimizer` takes; the inner optimizer sees master weights in the parameters' own
    shapes. It gets the same averaged gradients, bit for bit.
    """

    def _ownership(self, layout: BufferLayout) -> tuple[Sequence[Span], Sequence[Span]]:
        return layout.buckets, [Span(0, param.numel) for param in layout.params]

    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        return flat.view(param.shape) if param.ndim else flat  # 0-dim state would look like a number

    def _check_inner(self, build: Build, kinds: Sequence[Sequence[ProbeKind]]) -> None:
        """Whole parameters suit every optimizer."""

    def _average_grads(self, bucket: Tensor) -> None:
        # The two halves of an all-reduce, each in the order in which DistributedOptimizer adds.
        reduce_scatter_mean(bucket, self.groups.dp)
        all_gather_slices(bucket, self.groups.dp)

    def _share_params(self, bucket: Tensor) -> None:
        """Every rank has computed all of them."""

    def _norm_axes(self) -> Sequence[Axis]:
        return self.groups.tp, self.groups.pp

    def _declare_tensor(self, slot: Slot, entity: ParamEntity, prefix: str, tensor: Tensor) -> ShardedBase:
        return make_sharded_optimizer_tensor(entity, tensor.view(slot.param.shape), prefix)

    def _declare_scalar(self, slot: Slot, entity: ParamEntity, prefix: str, scalar: Tensor) -> ShardedTensor:
        return make_sharded_scalar(entity, scalar, prefix=prefix, replica=replica_of(entity))
