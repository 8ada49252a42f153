"""MixedPrecisionOptimizer: whole fp32 master weights on every rank that has the parameters.

Every rank updates all of its parameters and declares whole states, which are replicated like the parameters:
over dp x cp, those of experts over edp. The keys are those of `DistributedOptimizer`, so each optimizer loads
what the other saved. `master_optimizer` has the order of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedBase, ShardedTensor
from megackpt.training.optim.collectives import all_gather_slices, reduce_scatter_grads
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.optim.owned_params import OwnedParam
from megackpt.training.optim.ranges import BufferLayout, FlatRange
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    make_sharded_optimizer_tensor,
    make_sharded_scalar,
    replica_of,
)
from megackpt.training.optim.state_probe import OptimizerBuilder, StateSpec, kinds_of_masters, probe_whole
from megackpt.training.parallel.groups import Axis


class MixedPrecisionOptimizer(MasterOptimizer):
    """Any torch optimizer that steps without a closure, on whole master weights.

    The arguments are those of `DistributedOptimizer`. The inner optimizer gets master weights in the shapes
    of the parameters, and the same averaged gradients, bit for bit.

    State that has not the shape of the parameter (Adafactor's factors, norms, scales of blocks) is stored in
    arrays of its own. They can be loaded at any pp and dp, but belong to slices of parameters: another tp, or
    another ep of stacked experts, is an error when they are loaded.
    """

    _is_sharded = False

    def _ownership(self, layout: BufferLayout, axis: Axis) -> tuple[Sequence[FlatRange], Sequence[FlatRange]]:
        return layout.buckets, [FlatRange(0, param.numel) for param in layout.params]

    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        return flat.view(param.shape) if param.ndim else flat  # 0-dim state would look like a number

    def _probe_inner(
        self, build: OptimizerBuilder, masters: Sequence[Sequence[Tensor]]
    ) -> list[list[StateSpec]]:
        kinds = kinds_of_masters((group.params for group in self._groups), flat=False)
        return probe_whole(build, kinds, masters)

    def _reduce_bucket(self, bucket: Tensor, axis: Axis) -> None:
        # An all-reduce as two steps, which add in the same order as DistributedOptimizer does.
        reduce_scatter_grads(bucket, axis, divisor=self._grad_divisor)
        all_gather_slices(bucket, axis)

    def _share_params(self, bucket: Tensor, axis: Axis) -> None:
        """Do nothing: every rank has computed all of them."""

    def _declare_tensor(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, tensor: Tensor
    ) -> ShardedBase:
        return make_sharded_optimizer_tensor(entity, tensor.view(owned_param.param.shape), prefix)

    def _declare_scalar(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, scalar: Tensor
    ) -> ShardedTensor:
        return make_sharded_scalar(entity, scalar, prefix=prefix, replica=replica_of(entity))
