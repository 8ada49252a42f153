"""DistributedOptimizer: state sharded over data-parallel ranks (ZeRO-1), declared without communication.

A rank owns a slice of every bucket. So it has master weights and optimizer state of flat ranges of
parameters, and declares exactly those. `master_optimizer` has the order of a step.

Source: Rajbhandari et al. 2020, section 5.1 (P_os); Megatron-Core `DistributedOptimizer`. The stored form
is that of Megatron-Core's former `fully_sharded_model_space`: flat ranges of model parameters, which
reshard to any layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megackpt.optim.collectives import all_gather_slices, reduce_scatter_grads
from megackpt.optim.gather import StateRange, gather_states, join_states
from megackpt.optim.grad_sync import groups_of
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.optim.owned_params import OwnedParam
from megackpt.optim.ranges import BufferLayout, FlatRange
from megackpt.optim.sharded_state import (
    ParamEntity,
    find_param_entities,
    make_flat_optimizer_tensor,
    make_sharded_scalar,
    replica_of,
)
from megackpt.optim.state_probe import OptimizerBuilder, ProbeKind, check_elementwise
from megackpt.parallel.attributes import is_marked
from megackpt.parallel.groups import Axis, ParallelGroups


class DistributedOptimizer(MasterOptimizer):
    """Any elementwise torch optimizer, with its state sharded over the ranks that have equal parameters.

    Those are `groups.dp_cp` for dense parameters and `groups.edp` for parameters of experts.

    Args:
        params_or_groups: parameters, or groups of them, as torch.optim takes them; a group may have a `name`.
        optimizer_factory: creates the inner optimizer from groups whose parameters are 1-D master shards:
            fp32 copies for two-byte parameters, the parameters' own memory otherwise. It is called several
            times, also for small probes, so it must do nothing else.
        groups: the ranks around this one. Without communication (`ParallelGroups.offline`) everything but a
            step works.
        clip_grad: largest global gradient norm; 0 does not clip.
        bucket_size: elements that are exchanged at a time.
        grad_dtype: of the buffer that gradients are summed in.

    >>> import torch
    >>> from megackpt.parallel.groups import ParallelGroups
    >>> from megackpt.parallel.layout import ParallelLayout
    >>> model = torch.nn.Linear(4, 4)
    >>> groups = ParallelGroups.create(ParallelLayout())
    >>> optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.AdamW(g, lr=1e-3), groups)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = optimizer.step()
    >>> optimizer.zero_grad()

    Raises:
        OptimizerError: the inner optimizer is not elementwise, or keeps state that cannot be declared.
    """

    def sharded_state_dict(
        self, model_sharded_state_dict: ShardedStateDict, is_loading: bool = False, *, gathered: bool = False
    ) -> ShardedStateDict:
        """Declare this rank's optimizer state; see `MasterOptimizer.sharded_state_dict`.

        Local, unless `gathered` is set. Then the shards of each parameter are gathered on the first
        data-parallel rank, in host memory, and only that rank declares them (collective over dp and cp, and
        over edp for experts). The
        checkpoint has the same arrays in fewer files and larger chunks, at the cost of the exchange and of
        memory on that rank. To load, declare without it.
        """
        declared = super().sharded_state_dict(model_sharded_state_dict, is_loading)
        if not gathered:
            return declared
        entities = find_param_entities(model_sharded_state_dict, self._params)
        # Dense parameters first, on all ranks: a rank sends its ranges of the two to different ranks.
        for groups in self._groups_in_use:
            if groups.dp_cp.size > 1:
                self._declare_gathered(declared["state"], entities, groups)
        return declared

    def _declare_gathered(
        self,
        declared: dict[int, dict[str, ShardedBase]],
        entities: Sequence[ParamEntity],
        groups: ParallelGroups,
    ) -> None:
        """Replace the ranges of the parameters that are cut over `groups.dp_cp` by whole states."""
        own = [
            StateRange(owned_param.position, name, owned_param.flat_range, value)
            for owned_param in self._owned_params
            for name, value in self._inner.states(owned_param)
            if is_marked(owned_param.param, "expert_parallel") == groups.for_experts
            and self._is_elementwise(owned_param, name, value)
        ]
        for state in own:
            del declared[state.position][state.state]
        gathered = join_states(gather_states(own, groups.dp_cp), [p.numel() for p in self._params])
        for (position, name), data in gathered.items():
            entity, param = entities[position], self._params[position]
            declared.setdefault(position, {})[name] = entity.retarget(
                key=f"optimizer.state.{name}.{entity.key}",
                data=data.view(param.shape),
                replica_id=(*self._model_replica(param, entity), 0),
            )

    def _ownership(self, layout: BufferLayout, axis: Axis) -> tuple[Sequence[FlatRange], Sequence[FlatRange]]:
        return layout.owned_slices(axis.rank), layout.owned_ranges(axis.rank)

    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        return flat

    def _check_inner(self, build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]]) -> None:
        check_elementwise(build, kinds)

    def _reduce_bucket(self, bucket: Tensor, axis: Axis) -> None:
        reduce_scatter_grads(bucket, axis, divisor=self._grad_divisor)

    def _share_params(self, bucket: Tensor, axis: Axis) -> None:
        all_gather_slices(bucket, axis)

    def _declare_tensor(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, tensor: Tensor
    ) -> ShardedBase:
        return make_flat_optimizer_tensor(
            entity,
            tensor,
            prefix=prefix,
            flattened_range=owned_param.flat_range.as_slice(),
            replica=self._model_replica(owned_param.param, entity),
        )

    def _declare_scalar(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, scalar: Tensor
    ) -> ShardedTensor:
        # Of the ranks with elements of the parameter, the one with its first element has the main replica.
        axis = groups_of(owned_param.param, self.groups).dp_cp
        dp = 0 if owned_param.flat_range.start == 0 else 1 + axis.rank
        replica = (*self._model_replica(owned_param.param, entity), dp)
        return make_sharded_scalar(entity, scalar, prefix=prefix, replica=replica)

    def _model_replica(self, param: Parameter, entity: ParamEntity) -> tuple[int, int]:
        is_one_rank = groups_of(param, self.groups).tp.size == 1 and self.groups.pp.size == 1
        if isinstance(entity.replica_id, int) and not is_one_rank:
            raise DeclarationError(
                f"{entity.key!r}: replica_id {entity.replica_id} is a single number, which does not say "
                f"whether it counts tp, pp or dp ranks. Give the tuple (pipeline copy, tp rank if not "
                f"sharded over tp, dp rank).",
                key=entity.key,
                rank=self.groups.rank,
            )
        return replica_of(entity)[:2]
