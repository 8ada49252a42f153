"""The base class of the distributed and the plain mixed-precision optimizer.

It has the order of a training step, and declares and restores state. A subclass decides which elements of
each parameter this rank owns, how gradients and parameters are exchanged, and how state of the owned elements
is declared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.entities import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from megackpt.errors import MismatchError, MissingKeyError, truncated_list
from megackpt.training.optim.buffers import make_buffers
from megackpt.training.optim.grad_sync import (
    clip_factor,
    global_grad_norm,
    sum_over_model_ranks,
    touched_on_any_rank,
)
from megackpt.training.optim.inner_optimizer import InnerOptimizer, OptimizerFactory
from megackpt.training.optim.owned_params import OwnedParam, OwnedSlice, cut_params, cut_slices, cuts_of
from megackpt.training.optim.param_groups import (
    Hyperparameters,
    ParamsOrGroups,
    WhenDifferent,
    declare_group_numbers,
    hyperparameters,
    need_numbers,
    parse_param_groups,
    restore_hyperparameters,
    stored_group_names,
)
from megackpt.training.optim.ranges import BufferLayout, FlatRange
from megackpt.training.optim.remainders import is_rounded
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    find_param_entities,
    make_own_array,
)
from megackpt.training.optim.state_probe import OptimizerBuilder, StateSpec
from megackpt.training.parallel.groups import Axis, ParallelGroups

DEFAULT_BUCKET_SIZE = 40_000_000
"""In elements, as in Megatron-Core: large enough for full bandwidth, small enough for temporary copies."""


class MasterOptimizer(ABC):
    """A torch optimizer on master weights, with gradients summed in flat buffers over all ranks.

    Attributes:
        groups: the ranks around this one.
        clip_grad: largest global gradient norm; 0 or less does not clip.
        buffers: parameters and gradients, one for each dtype and device of dense parameters and of experts.
    """

    _is_sharded = True  # whether a rank owns ranges of parameters, and not all of them
    _sums_apart = False  # see `make_buffers`

    def __init__(
        self,
        params_or_groups: ParamsOrGroups,
        optimizer_factory: OptimizerFactory,
        groups: ParallelGroups,
        *,
        clip_grad: float = 0.0,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.groups = groups
        self.clip_grad = clip_grad
        self._groups = parse_param_groups(params_or_groups)
        self._params = [p for group in self._groups for p in group.params]
        self.buffers = make_buffers(
            self._params,
            groups,
            bucket_size=bucket_size,
            grad_dtype=grad_dtype,
            sums_apart=self._sums_apart,
        )
        ownership = [self._ownership(buffer.layout, buffer.groups.dp_cp) for buffer in self.buffers]
        self._slices = [cut_slices(b, slices) for b, (slices, _) in zip(self.buffers, ownership, strict=True)]
        self._owned_params = self._cut_params([ranges for _, ranges in ownership])
        self._inner = InnerOptimizer(self._groups, self._owned_params, optimizer_factory, self._probe_inner)

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer, on master weights. Give this one to learning-rate schedulers."""
        return self._inner.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: hyperparameters to read and set; `params` are master weights."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take one training step and return the global gradient norm before clipping, 0-dim fp64. Collective.

        In this order: sums over tp and the ends of the pipeline; mean over dp x cp; norm and clipping; the
        inner optimizer on the master weights; parameters from master weights. A parameter without a gradient
        on any rank does not change.

        Raises:
            OptimizerError: called twice without `zero_grad` between.
        """
        for buffer in self.buffers:
            buffer.collect()
        touched = self._reduce_grads()
        norm = global_grad_norm(
            ((owned.param, owned.flat_range, owned.grad) for owned in self._owned_params),
            self.groups,
            has_experts=any(buffer.groups.for_experts for buffer in self.buffers),
            is_sharded=self._is_sharded,
            device=self._device,
        )
        self._clip_grads(norm)
        self._inner.step(touched)
        self._copy_masters()
        self._share_all_params()
        return norm

    def _clip_grads(self, norm: Tensor) -> None:
        if self.clip_grad > 0:
            factor = clip_factor(norm, self.clip_grad)
            for owned_slice in self._all_slices():
                owned_slice.grad.mul_(factor.to(owned_slice.grad.device, owned_slice.grad.dtype))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. Call it between a step and the next backward pass. Local.

        set_to_none is for torch's signature and has no effect: `param.grad` is always None here.
        """
        del set_to_none
        for buffer in self.buffers:
            buffer.zero_grad()

    @torch.no_grad()
    def sync_params(self) -> None:
        """Write the master weights into the model's parameters, on all ranks. Collective."""
        self._copy_masters()
        self._share_all_params()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the model's parameters to the master weights, after only the model was loaded. Local.

        Source: Megatron-Core `MegatronOptimizer.reload_model_params`.
        """
        for owned_slice in self._all_slices():
            if owned_slice.has_copy:
                owned_slice.master.copy_(owned_slice.data)

    def state_dict(self) -> StateDict:
        """Return the hyperparameters of every group by name; tensors are in `sharded_state_dict`. Local.

        The name of a group without one is its position.
        """
        return {"param_groups": hyperparameters(self.inner.param_groups)}

    def load_state_dict(self, state_dict: StateDict, *, when_different: WhenDifferent = "checkpoint") -> None:
        """Restore what `state_dict` returned. Local. when_different is as for `load_sharded_state_dict`.

        Raises:
            MismatchError: the names of the groups differ, or their configuration (see `when_different`).
            MissingKeyError: state_dict has no groups.
        """
        if "param_groups" not in state_dict:
            raise MissingKeyError(
                f"'param_groups' is not in the state dict, which has {sorted(map(str, state_dict))}. Pass "
                f"what state_dict() of this optimizer returned.",
                path="param_groups",
            )
        restore_hyperparameters(
            self.inner.param_groups, state_dict["param_groups"], when_different=when_different
        )

    def sharded_state_dict(
        self, model_sharded_state_dict: ShardedStateDict, is_loading: bool = False
    ) -> ShardedStateDict:
        """Declare this rank's optimizer state, without any communication. Local.

        Args:
            model_sharded_state_dict: of the model; its entities wrap the parameters.
            is_loading: for Megatron-Core's signature; it has no effect, as state exists from construction on.

        Returns:
            `state`, by position of the parameter and name of the state, with the keys
            `optimizer.state.<state>.<model key>`; `param_groups`, hyperparameters by group name, which must
            be equal on all ranks. If one of several groups has no name, also `param_group_of`: the number of
            each parameter's group, with the keys `optimizer.param_group.<model key>`.

        Raises:
            DeclarationError: a parameter of the optimizer is not in model_sharded_state_dict, or entities
                there wrap detached copies of the parameters.
        """
        del is_loading
        entities = find_param_entities(
            model_sharded_state_dict, [owned_param.param for owned_param in self._owned_params]
        )
        for owned_param, entity in zip(self._owned_params, entities, strict=True):
            owned_param.key = entity.key
        state = {
            owned_param.position: {
                name: self._declare(owned_param, entity, name, value)
                for name, value in self._inner.states(owned_param)
            }
            for owned_param, entity in zip(self._owned_params, entities, strict=True)
        }
        declared: ShardedStateDict = {"state": state, **self.state_dict()}
        if need_numbers(self._groups):
            declared["param_group_of"] = declare_group_numbers(self._groups, model_sharded_state_dict)
        return declared

    @torch.no_grad()
    def load_sharded_state_dict(
        self, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
    ) -> None:
        """Restore what a load of `sharded_state_dict` returned. Load the model before.

        Local, but collective over pp where there are several groups, some without a name: these are matched
        by their parameters, of which a stage has a part. In a checkpoint that does not have the numbers of
        groups (of an older version) they are matched by position.

        Tensors that were loaded in place are not copied, others are. State that was not loaded does not
        change; master weights that were not loaded are copied from the model's parameters. Loaded master
        weights must round to the loaded parameters on every rank; then nothing needs to be exchanged.

        Args:
            loaded: the part of the loaded state dict that `sharded_state_dict` has declared.
            when_different: what to do if groups are configured otherwise than in the checkpoint (weight
                decay, betas, eps, the rates that a schedule computes from): "checkpoint" goes on as stored,
                "given" as given, both with a warning; "error" raises one. Steps and the present rate always
                continue as stored.

        Raises:
            MismatchError: the names of the groups differ, groups without a name were made of other
                parameters, a tensor has another size, or parameters are not the rounded master weights; or
                the configuration differs, with "error".
        """
        if "param_groups" in loaded:
            self._restore_hyperparameters(
                loaded["param_groups"], loaded.get("param_group_of", {}), when_different
            )
        states = loaded.get("state", {})
        for owned_param in self._owned_params:
            self._inner.restore(owned_param, states.get(owned_param.position, {}))
        self._check_params_are_rounded_masters()

    @abstractmethod
    def _ownership(self, layout: BufferLayout, axis: Axis) -> tuple[Sequence[FlatRange], Sequence[FlatRange]]:
        """Return the ranges that this rank owns: of the buffer in each bucket, and of each parameter.

        axis has the ranks with equal parameters.
        """

    @abstractmethod
    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        """Return the view of a parameter's owned range that the inner optimizer gets."""

    @abstractmethod
    def _probe_inner(
        self, build: OptimizerBuilder, masters: Sequence[Sequence[Tensor]]
    ) -> list[list[StateSpec]]:
        """Return the structure of the state of each master, by group.

        Raise an error if the inner optimizer cannot work on such masters.
        """

    @abstractmethod
    def _reduce_bucket(self, bucket: Tensor, axis: Axis) -> None:
        """Average the owned range of a bucket of gradients; axis has the ranks that share it. Collective."""

    @abstractmethod
    def _share_params(self, bucket: Tensor, axis: Axis) -> None:
        """Send the owned range of a bucket of parameters to the ranks that need it. Collective."""

    @abstractmethod
    def _declare_tensor(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, tensor: Tensor
    ) -> ShardedBase:
        """Declare a state of the shape of the owned parameter's master."""

    @abstractmethod
    def _declare_scalar(
        self, owned_param: OwnedParam, entity: ParamEntity, prefix: str, scalar: Tensor
    ) -> ShardedTensor:
        """Declare a 0-dim state of the whole parameter."""

    def _restore_hyperparameters(
        self, stored: Hyperparameters, numbers: Mapping[int, Tensor], when_different: WhenDifferent
    ) -> None:
        names: Mapping[str, str] = {}
        if need_numbers(self._groups):
            names = stored_group_names(self._groups, numbers, stored, pp=self.groups.pp, device=self._device)
        restore_hyperparameters(self.inner.param_groups, stored, names, when_different=when_different)

    @property
    def _grad_divisor(self) -> int:
        """Number of ranks with tokens of their own, of whose losses the mean is minimised."""
        return self.groups.dp_cp.size

    @property
    def _groups_in_use(self) -> list[ParallelGroups]:
        """The ranks as dense parameters see them, and as those of experts do, where there are such."""
        in_use = {buffer.groups.for_experts: buffer.groups for buffer in self.buffers}
        return [in_use[for_experts] for for_experts in sorted(in_use)]

    @property
    def _device(self) -> torch.device:
        return self.buffers[0].grad.device if self.buffers else torch.device("cpu")

    def _all_slices(self) -> Iterator[OwnedSlice]:
        for slices in self._slices:
            yield from slices

    def _cut_params(self, ranges_of_buffers: Sequence[Sequence[FlatRange]]) -> list[OwnedParam]:
        position = {id(param): position for position, param in enumerate(self._params)}
        owned_params: list[OwnedParam] = []
        for buffer, slices, ranges in zip(self.buffers, self._slices, ranges_of_buffers, strict=True):
            positions = [position[id(param)] for param in buffer.params]
            owned_params += cut_params(buffer, slices, ranges, positions=positions, shape=self._shape_master)
        return sorted(owned_params, key=lambda owned_param: owned_param.position)

    def _reduce_grads(self) -> set[int]:
        """Average the owned gradients; return the ids of parameters that any rank touched."""
        sum_over_model_ranks(self._params, self.groups)
        self._average_grads()
        flags = {id(p): t for b in self.buffers for p, t in zip(b.params, b.touched, strict=True)}
        touched = touched_on_any_rank(self._params, [flags[id(p)] for p in self._params], self.groups)
        return {id(param) for param, is_touched in zip(self._params, touched, strict=True) if is_touched}

    def _average_grads(self) -> None:
        for buffer in self.buffers:
            for bucket in buffer.layout.buckets:
                self._reduce_bucket(buffer.grad[bucket.as_slice()], buffer.groups.dp_cp)

    def _copy_masters(self) -> None:
        for owned_slice in self._all_slices():
            if owned_slice.has_copy:
                owned_slice.data.copy_(owned_slice.master)

    def _share_all_params(self) -> None:
        for buffer in self.buffers:
            for bucket in buffer.layout.buckets:
                self._share_params(buffer.data[bucket.as_slice()], buffer.groups.dp_cp)

    def _declare(self, owned_param: OwnedParam, entity: ParamEntity, name: str, value: Any) -> ShardedBase:
        prefix = f"optimizer.state.{name}"
        if self._is_elementwise(owned_param, name, value):
            return self._declare_tensor(owned_param, entity, prefix, value)
        if name in owned_param.arrays:
            return make_own_array(
                entity, _as_tensor(value), prefix=prefix, cuts=cuts_of(owned_param.param, self.groups)
            )
        return self._declare_scalar(owned_param, entity, prefix, _as_tensor(value).view(()))

    def _is_elementwise(self, owned_param: OwnedParam, name: str, value: Any) -> bool:
        """Return whether a state has one value for each element of the master, and not one for all."""
        of_one_shape = isinstance(value, Tensor) and value.shape == owned_param.master.shape
        return of_one_shape and name not in owned_param.scalars | owned_param.arrays

    def _check_params_are_rounded_masters(self) -> None:
        wrong = [
            owned_param
            for owned_param in self._owned_params
            if owned_param.has_copy and not is_rounded(owned_param.data, owned_param.master)
        ]
        if wrong:
            lines = [str(owned_param) for owned_param in wrong]
            raise MismatchError(
                f"The model's weights are not the {wrong[0].data.dtype} values of the master weights that "
                f"were loaded, for {len(wrong)} parameters:\n{truncated_list(lines)}\nLoad the model from "
                f"the same checkpoint before the optimizer. If the weights were meant to come from "
                f"elsewhere, call reload_model_params() to train on from them; if the dtype changed since "
                f"the checkpoint was saved, call sync_params() on all ranks. Everything else is restored.",
                rank=self.groups.rank,
            )


def _as_tensor(value: Tensor | float) -> Tensor:
    """Return the tensor itself, so that loading fills it in place, or a 0-dim copy of a number."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
