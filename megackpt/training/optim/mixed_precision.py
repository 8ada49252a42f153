"""MixedPrecisionOptimizer: fp32 masters on each rank that has the parameters; and WholeMatrixOptimizer.

Every rank updates all of its parameters and declares whole states, which are replicated like the parameters:
over dp x cp, those of experts over edp. The keys are those of `DistributedOptimizer`, so each optimizer loads
what the other saved. `master_optimizer` has the order of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedBase, ShardedTensor, StateDict
from megackpt.training.optim.collectives import all_gather_slices, reduce_scatter_grads
from megackpt.training.optim.inner_optimizer import OptimizerFactory
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.optim.owned_params import OwnedParam, model_replica
from megackpt.training.optim.param_groups import ParamsOrGroups, WhenDifferent
from megackpt.training.optim.ranges import BufferLayout, FlatRange
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    make_sharded_optimizer_tensor,
    make_sharded_scalar,
    replica_of,
)
from megackpt.training.optim.state_probe import OptimizerBuilder, StateSpec, kinds_of_masters, probe_whole
from megackpt.training.parallel.groups import Axis, ParallelGroups


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


# WholeMatrixOptimizer: each parameter is updated by one of the ranks that have it, as a whole.
#
# For optimizers that need whole matrices (Muon, SOAP, Shampoo) and are too expensive to run on every rank.
# State is keyed by parameter and declared by its owner alone, so any number of ranks can load it: they choose
# owners anew. `master_optimizer` has the order of a step.
#
# Source: Megatron-Core `LayerWiseDistributedOptimizer`; its checkpoints can be loaded at one dp only.


def owners_by_size(numels: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the rank that owns each parameter: the largest first, each to the rank with the least so far.

    Equal on all ranks. Pure.

    >>> owners_by_size([4, 10, 4, 3], 2)
    (1, 0, 1, 1)
    """
    loads, owners = [0] * ranks, [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owners[index] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += numels[index]
    return tuple(owners)


class WholeMatrixOptimizer(MixedPrecisionOptimizer):
    """Any torch optimizer that steps without a closure; each rank updates whole parameters of its own.

    Of the ranks with equal parameters (`groups.dp_cp`, and `groups.edp` for experts) each owns some of them,
    packed by size, with their master weights and their state. After a step it broadcasts them.

    Give it the matrices. Embeddings and 1-D parameters go to a `DistributedOptimizer` with Adam next to this
    one; their gradient norms, and `clip_grad`, are then of each optimizer's own parameters. Over tp and ep a
    rank has slices of parameters, and the inner optimizer gets these slices: Muon then orthogonalises each by
    itself, so that another tp or ep trains differently, though its state is loaded exactly.

    The arguments are those of `DistributedOptimizer` without its last four.

    >>> import torch
    >>> from megackpt.training.parallel.layout import ParallelLayout
    >>> model = torch.nn.Linear(4, 4, bias=False)
    >>> groups = ParallelGroups.create(ParallelLayout())
    >>> optimizer = WholeMatrixOptimizer(model.parameters(), lambda g: torch.optim.SGD(g, lr=0.1), groups)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = optimizer.step()

    Raises:
        OptimizerError: the inner optimizer keeps state that cannot be declared.
    """

    _is_sharded = True

    def __init__(
        self,
        params_or_groups: ParamsOrGroups,
        optimizer_factory: OptimizerFactory,
        groups: ParallelGroups,
        *,
        clip_grad: float = 0.0,
    ) -> None:
        # A bucket ends before it would exceed its size: so each parameter has one of its own.
        super().__init__(params_or_groups, optimizer_factory, groups, clip_grad=clip_grad, bucket_size=1)

    def load_sharded_state_dict(
        self, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
    ) -> None:
        """Restore what a load of `sharded_state_dict` returned. Load the model before. Collective.

        After it the parameters of all ranks are those of their owners.

        Raises:
            MismatchError: see `MasterOptimizer`.
        """
        super().load_sharded_state_dict(loaded, when_different=when_different)
        self._share_all_params()

    def _ownership(self, layout: BufferLayout, axis: Axis) -> tuple[Sequence[FlatRange], Sequence[FlatRange]]:
        # A slice is the whole bucket of an owned parameter, or nothing of it.
        slices = [FlatRange(bucket.start, bucket.start) for bucket in layout.buckets]
        ranges = [FlatRange(0, 0) for _ in layout.params]
        for index, owner in enumerate(_owners(layout, axis)):
            if owner == axis.rank:
                bucket = layout.bucket_of_param[index]
                slices[bucket] = layout.buckets[bucket]
                ranges[index] = FlatRange(0, layout.params[index].numel)
        return slices, ranges

    def _share_all_params(self) -> None:
        works = []
        for buffer in self.buffers:
            axis = buffer.groups.dp_cp
            if axis.group is None:
                continue
            for flat_range, owner in zip(buffer.layout.params, _owners(buffer.layout, axis), strict=True):
                data = buffer.data[flat_range.as_slice()]
                works.append(dist.broadcast(data, axis.ranks[owner], group=axis.group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def _declare(self, owned_param: OwnedParam, entity: ParamEntity, name: str, value: Any) -> ShardedBase:
        # The owner is the only rank of dp that declares it, so it has the main replica whatever its rank is.
        replica = (*model_replica(owned_param.param, entity, self.groups), 0)
        of_owner = entity.retarget(key=entity.key, data=owned_param.param, replica_id=replica)
        return super()._declare(owned_param, of_owner, name, value)


def _owners(layout: BufferLayout, axis: Axis) -> tuple[int, ...]:
    return owners_by_size([param.numel for param in layout.params], axis.size)
