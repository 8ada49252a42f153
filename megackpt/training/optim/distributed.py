"""DistributedOptimizer: state sharded over the ranks with equal parameters, declared without communication.

A rank owns a slice of every bucket. So it has master weights and optimizer state of flat ranges of
parameters, and declares exactly those. `master_optimizer` has the order of a step.

Source: Rajbhandari et al. 2020, section 5.1 (P_os, ZeRO-1); Megatron-Core `DistributedOptimizer`. The stored
form is that of Megatron-Core's former `fully_sharded_model_space`: flat ranges of model parameters, which
reshard to any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.entities import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from megackpt.errors import DeclarationError
from megackpt.training.optim.collectives import all_gather_slices, reduce_scatter_grads
from megackpt.training.optim.grad_sync import groups_of
from megackpt.training.optim.inner_optimizer import OptimizerFactory
from megackpt.training.optim.master_optimizer import DEFAULT_BUCKET_SIZE, MasterOptimizer
from megackpt.training.optim.overlap import GradientReductions, ParameterGathers, buckets_in_order
from megackpt.training.optim.owned_params import OwnedParam, model_replica
from megackpt.training.optim.param_groups import ParamsOrGroups, WhenDifferent
from megackpt.training.optim.ranges import BufferLayout, FlatRange
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    find_param_entities,
    make_flat_optimizer_tensor,
    make_sharded_scalar,
)
from megackpt.training.optim.state_probe import (
    OptimizerBuilder,
    StateSpec,
    check_elementwise,
    kinds_of_masters,
    probe_shards,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import Axis, ParallelGroups

# Gathers sharded optimizer state on the first of the ranks that share it, for checkpoints of few files.
#
# The optimizer decides which state is gathered and how the result is declared.
#
# Source: Megatron-Core `DistributedOptimizer`, `dp_zero_gather_scatter`. Here the result is whole parameters,
# which reshard to any layout.


@dataclass(frozen=True, slots=True)
class StateRange:
    """A range of one state of one parameter, flattened.

    Attributes:
        position: of the parameter among all of the optimizer's.
        state: name of the state, e.g. `exp_avg`.
        flat_range: the range.
        data: its elements, 1-D.
    """

    position: int
    state: str
    flat_range: FlatRange
    data: Tensor


def gather_states(own: Sequence[StateRange], axis: Axis) -> list[StateRange]:
    """Gather the ranges of all ranks of an axis on its first rank. Collective over the axis.

    Returns them in host memory on the first rank, and an empty list on the others. The first rank needs
    memory for all of them; the others send one after the other.

    Raises:
        DeclarationError: the groups were made without communication.
    """
    if axis.size == 1:
        return list(own)
    if axis.group is None:
        raise DeclarationError(
            "Gathering optimizer state needs groups that communicate. Make them with ParallelGroups.create."
        )
    all_descriptions = _gather_descriptions(own, axis)
    if all_descriptions is None:
        for state in own:
            dist.send(state.data.contiguous(), axis.ranks[0], group=axis.group)
        return []
    gathered = [StateRange(p.position, p.state, p.flat_range, p.data.cpu()) for p in own]
    device = own[0].data.device if own else torch.device("cpu")
    for source, described in zip(axis.ranks[1:], all_descriptions[1:], strict=True):
        gathered += _receive_ranges(described, source, axis, device)
    return gathered


_Description: TypeAlias = tuple[int, str, int, int, torch.dtype]
"""Position, state, start, stop and dtype of a range, which follows as a message without a head."""


def _gather_descriptions(own: Sequence[StateRange], axis: Axis) -> list[list[_Description]] | None:
    """Gather the descriptions of all ranks' ranges on the first rank; None on others. Collective."""
    descriptions = [(p.position, p.state, p.flat_range.start, p.flat_range.stop, p.data.dtype) for p in own]
    gathered: list[list[_Description]] | None = [[] for _ in axis.ranks] if axis.is_first else None
    dist.gather_object(descriptions, gathered, dst=axis.ranks[0], group=axis.group)
    return gathered


def _receive_ranges(
    described: Sequence[_Description], source: int, axis: Axis, device: torch.device
) -> Iterator[StateRange]:
    """Yield the ranges that a rank sends, in the order of its description."""
    for position, name, start, stop, dtype in described:
        received = torch.empty(stop - start, dtype=dtype, device=device)
        dist.recv(received, source, group=axis.group)
        yield StateRange(position, name, FlatRange(start, stop), received.cpu())


def join_states(ranges: Sequence[StateRange], numels: Sequence[int]) -> dict[tuple[int, str], Tensor]:
    """Return each state of each parameter as one 1-D tensor, by position and name. Local.

    Args:
        ranges: of all ranks; those of one state cover it.
        numels: the sizes of all parameters of the optimizer, in elements.
    """
    whole: dict[tuple[int, str], Tensor] = {}
    for state in ranges:
        named = (state.position, state.state)
        if named not in whole:
            whole[named] = torch.empty(numels[state.position], dtype=state.data.dtype)
        whole[named][state.flat_range.as_slice()] = state.data
    return whole


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
        overlap_grad_reduce: start to reduce a bucket of gradients in the backward pass that completes it: the
            last of `micro_batches`, which you set if gradients of several backward passes are summed.
        overlap_param_gather: modules of the model; parameters are gathered after `step` has returned, and
            each of these modules waits for its own before its forward pass. Give the layers, in the order in
            which they run. A module may use its own parameters, those of modules that ran before, and those
            that none of the modules has. Call `finish_param_sync` before anything else reads parameters.

    With either of the two, making the optimizer is collective: it creates process groups. Results are equal
    bit for bit to those without them, with one exception: `overlap_grad_reduce` puts parameters whose
    gradients are first summed over other ranks (tp, a tied embedding) into buckets of their own. Shards then
    end elsewhere, which may change the last bits of a step.

    >>> import torch
    >>> from megackpt.training.parallel.groups import ParallelGroups
    >>> from megackpt.training.parallel.layout import ParallelLayout
    >>> model = torch.nn.Linear(4, 4)
    >>> groups = ParallelGroups.create(ParallelLayout())
    >>> optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.AdamW(g, lr=1e-3), groups)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = optimizer.step()
    >>> optimizer.zero_grad()

    Raises:
        OptimizerError: the inner optimizer is not elementwise, or keeps state that cannot be declared.
    """

    def __init__(
        self,
        params_or_groups: ParamsOrGroups,
        optimizer_factory: OptimizerFactory,
        groups: ParallelGroups,
        *,
        clip_grad: float = 0.0,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        grad_dtype: torch.dtype = torch.float32,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: Iterable[nn.Module] = (),
    ) -> None:
        modules = tuple(overlap_param_gather)
        if overlap_grad_reduce or modules:
            # The model may use the same ranks for exchanges of its own (ep, cp), at the same time.
            groups = groups.with_own_process_groups("dp_cp", "edp")
        # Buckets with gradients that are summed over other ranks first cannot be reduced early.
        self._sums_apart = overlap_grad_reduce
        super().__init__(
            params_or_groups,
            optimizer_factory,
            groups,
            clip_grad=clip_grad,
            bucket_size=bucket_size,
            grad_dtype=grad_dtype,
        )
        buckets = buckets_in_order(self.buffers, self._params)
        self._reductions: GradientReductions | None = None
        if overlap_grad_reduce:
            self._reductions = GradientReductions(buckets, groups, divisor=self._grad_divisor)
        self._gathers = ParameterGathers(buckets, modules) if modules else None

    @property
    def micro_batches(self) -> int:
        """Number of backward passes before a step; only `overlap_grad_reduce` needs it. 1 at first."""
        return 1 if self._reductions is None else self._reductions.micro_batches

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        if self._reductions is not None:
            self._reductions.micro_batches = count

    def step(self) -> Tensor:
        """Take one training step; see `MasterOptimizer.step`. Collective.

        With `overlap_param_gather`, parameters are still being gathered when it returns.
        """
        self.finish_param_sync()
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. Call it between a step and the next backward pass. Local.

        Raises:
            OptimizerError: the backward pass has started to reduce them, and no step was taken.
        """
        if self._reductions is not None:
            self._reductions.reset()
        super().zero_grad(set_to_none)

    def skip_step(self) -> None:
        """Drop the gradients without a step, also those that the backward pass reduces. Collective."""
        if self._reductions is not None:
            self._reductions.finish()
        self.zero_grad()

    def finish_param_sync(self) -> None:
        """Wait until the parameters of the last step are gathered. Local."""
        if self._gathers is not None:
            self._gathers.finish()

    def sync_params(self) -> None:
        """Write the master weights into the model's parameters, on all ranks. Collective."""
        self.finish_param_sync()
        super().sync_params()
        self.finish_param_sync()

    def reload_model_params(self) -> None:
        """Copy the model's parameters to the master weights; see `MasterOptimizer`. Local."""
        self.finish_param_sync()
        super().reload_model_params()

    def load_sharded_state_dict(
        self, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
    ) -> None:
        """Restore what a load of `sharded_state_dict` returned; see `MasterOptimizer`."""
        self.finish_param_sync()
        super().load_sharded_state_dict(loaded, when_different=when_different)

    def sharded_state_dict(
        self, model_sharded_state_dict: ShardedStateDict, is_loading: bool = False, *, gathered: bool = False
    ) -> ShardedStateDict:
        """Declare this rank's optimizer state; see `MasterOptimizer.sharded_state_dict`.

        Local, unless `gathered` is set. Then the shards of each parameter are gathered on the first of the
        ranks that have it, in host memory, and only that rank declares them (collective over dp and cp, and
        over edp for experts). The checkpoint has the same arrays in fewer files and larger chunks, at the
        cost of the exchange and of memory on that rank. To load, declare without it.
        """
        self.finish_param_sync()  # what is declared, of the model too, may be saved at once
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
                replica_id=(*model_replica(param, entity, self.groups), 0),
            )

    def _ownership(self, layout: BufferLayout, axis: Axis) -> tuple[Sequence[FlatRange], Sequence[FlatRange]]:
        return layout.owned_slices(axis.rank), layout.owned_ranges(axis.rank)

    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        return flat

    def _probe_inner(
        self, build: OptimizerBuilder, masters: Sequence[Sequence[Tensor]]
    ) -> list[list[StateSpec]]:
        kinds = kinds_of_masters((group.params for group in self._groups), flat=True)
        check_elementwise(build, kinds)
        return probe_shards(build, kinds, masters)

    def _reduce_bucket(self, bucket: Tensor, axis: Axis) -> None:
        reduce_scatter_grads(bucket, axis, divisor=self._grad_divisor)

    def _average_grads(self) -> None:
        if self._reductions is None:
            super()._average_grads()
        else:
            self._reductions.finish()

    def _share_all_params(self) -> None:
        if self._gathers is None:
            super()._share_all_params()
        else:
            self._gathers.start()

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
            replica=model_replica(owned_param.param, entity, self.groups),
        )

    def _declare_scalar(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, scalar: Tensor
    ) -> ShardedTensor:
        # Of the ranks with elements of the parameter, the one with its first element has the main replica.
        axis = groups_of(owned_param.param, self.groups).dp_cp
        dp = 0 if owned_param.flat_range.start == 0 else 1 + axis.rank
        replica = (*model_replica(owned_param.param, entity, self.groups), dp)
        return make_sharded_scalar(entity, scalar, prefix=prefix, replica=replica)
