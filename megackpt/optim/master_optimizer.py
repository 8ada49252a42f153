"""What the distributed and the plain mixed-precision optimizer have in common.

Owns the order of a training step, and how its state enters and leaves a sharded state dict. A subclass
decides which part of each parameter this rank owns, how gradients and parameters are exchanged for that,
and how a state of the owned part is declared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.errors import MismatchError, MissingKeyError, truncated_list
from megackpt.mapping import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from megackpt.optim.buffers import make_buffers
from megackpt.optim.grad_sync import agree_on_touched, clip_factor, global_grad_norm, sum_over_model_ranks
from megackpt.optim.inner_optimizer import InnerOptimizer, OptimizerFactory
from megackpt.optim.owned import Piece, Slot, cut_pieces, cut_slots
from megackpt.optim.param_groups import (
    ParamsOrGroups,
    hyperparameters,
    parse_param_groups,
    restore_hyperparameters,
)
from megackpt.optim.ranges import BufferLayout, Span
from megackpt.optim.sharded_state import ParamEntity, find_param_entities
from megackpt.optim.state_init import Build, ProbeKind
from megackpt.parallel.groups import Axis, ParallelGroups

DEFAULT_BUCKET_SIZE = 40_000_000
"""Elements, as in Megatron-Core: large enough to fill the wire, small enough to bound temporary copies."""


class MasterOptimizer(ABC):
    """A torch optimizer on master weights, with gradients summed in flat buffers over all ranks.

    Attributes:
        groups: the ranks around this one.
        clip_grad: largest global gradient norm; 0 or less does not clip.
        buffers: parameters and gradients, one for each dtype and device.
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
    ) -> None:
        self.groups = groups
        self.clip_grad = clip_grad
        param_groups = parse_param_groups(params_or_groups)
        self._params = [p for group in param_groups for p in group.params]
        self.buffers = make_buffers(
            self._params, dp=groups.dp.size, bucket_size=bucket_size, grad_dtype=grad_dtype
        )
        owned = [self._ownership(buffer.layout) for buffer in self.buffers]
        self._pieces = [cut_pieces(b, slices) for b, (slices, _) in zip(self.buffers, owned, strict=True)]
        self._slots = self._cut_slots([ranges for _, ranges in owned])
        self._inner = InnerOptimizer(param_groups, self._slots, optimizer_factory, self._check_inner)

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer, on master weights. Learning-rate schedulers are given this one."""
        return self._inner.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: hyperparameters to read and set; `params` are master weights."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take one training step and return the global gradient norm before clipping, 0-dim fp64. Collective.

        In this order: sums over tp and the ends of the pipeline; mean over dp; norm and clipping; the inner
        optimizer on the master weights; parameters from them. A parameter that no rank has a gradient for is
        left alone.

        Raises:
            OptimizerError: called twice without `zero_grad` between.
        """
        for buffer in self.buffers:
            buffer.collect()
        touched = self._reduce_grads()
        norm = global_grad_norm(
            ((slot.param, slot.owned, slot.grad) for slot in self._slots),
            self.groups,
            axes=self._norm_axes(),
            device=self._device,
        )
        if self.clip_grad > 0:
            factor = clip_factor(norm, self.clip_grad)
            for piece in self._all_pieces():
                piece.grad.mul_(factor.to(piece.grad.device, piece.grad.dtype))
        self._inner.step(touched)
        self.sync_params()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Make all gradients zero; to be called between a step and the next backward pass. Local.

        set_to_none is there for torch's signature: `param.grad` is None here at all times.
        """
        del set_to_none
        for buffer in self.buffers:
            buffer.zero_grad()

    @torch.no_grad()
    def sync_params(self) -> None:
        """Write the master weights into the model's parameters, on all ranks. Collective over dp."""
        for buffer, pieces in zip(self.buffers, self._pieces, strict=True):
            for piece in pieces:
                if piece.has_copy:
                    piece.data.copy_(piece.master)
                self._share_params(buffer.data[buffer.layout.buckets[piece.bucket].as_slice()])

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take the model's parameters as the master weights, after only the model was loaded. Local.

        Source: Megatron-Core `MegatronOptimizer.reload_model_params`.
        """
        for piece in self._all_pieces():
            if piece.has_copy:
                piece.master.copy_(piece.data)

    def state_dict(self) -> StateDict:
        """Return the hyperparameters of every group by name; tensors are in `sharded_state_dict`. Local."""
        return {"param_groups": hyperparameters(self.inner.param_groups)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned. Local.

        Raises:
            MismatchError: the names of the groups differ.
            MissingKeyError: state_dict has no groups.
        """
        if "param_groups" not in state_dict:
            raise MissingKeyError(
                f"'param_groups' is not in the state dict, which has {sorted(map(str, state_dict))}. Pass "
                f"what state_dict() of this optimizer returned.",
                path="param_groups",
            )
        restore_hyperparameters(self.inner.param_groups, state_dict["param_groups"])

    def sharded_state_dict(
        self, model_sharded_state_dict: ShardedStateDict, is_loading: bool = False
    ) -> ShardedStateDict:
        """Declare this rank's optimizer state, without any communication. Local.

        model_sharded_state_dict is of the model: its entities wrap the parameters and tell where they lie.
        The result has `state`, by position of the parameter and name of the state, and `param_groups`,
        hyperparameters by group name, which must be equal on all ranks. Entities have the keys
        `optimizer.state.<state>.<model key>`. State exists from construction on, so is_loading, there for
        Megatron-Core's signature, changes nothing.

        Raises:
            DeclarationError: a parameter of the optimizer is not in model_sharded_state_dict, or that was
                built from detached copies of the parameters.
        """
        del is_loading
        entities = find_param_entities(model_sharded_state_dict, [slot.param for slot in self._slots])
        for slot, entity in zip(self._slots, entities, strict=True):
            slot.key = entity.key
        state = {
            slot.position: {
                name: self._declare(slot, entity, name, value) for name, value in self._inner.states(slot)
            }
            for slot, entity in zip(self._slots, entities, strict=True)
        }
        return {"state": state, **self.state_dict()}

    @torch.no_grad()
    def load_sharded_state_dict(self, loaded: StateDict) -> None:
        """Take over what a load of `sharded_state_dict` returned; the model is loaded before. Local.

        Tensors that were filled in place are left, others are copied; what is not there stays as it is.
        Master weights that the checkpoint does not have are made from the model's parameters. Those that it
        has round to the parameters that it has, on every rank, so that nothing needs to be exchanged; this
        is checked.

        Raises:
            MismatchError: the names of the groups differ, a tensor has another size, or parameters are not
                the rounded master weights.
        """
        if "param_groups" in loaded:
            self.load_state_dict(loaded)
        states = loaded.get("state", {})
        for slot in self._slots:
            self._inner.restore(slot, states.get(slot.position, {}))
        self._check_params_are_rounded_masters()

    @abstractmethod
    def _ownership(self, layout: BufferLayout) -> tuple[Sequence[Span], Sequence[Span]]:
        """Return what this rank owns: a range of the buffer in each bucket, and a range of each parameter."""

    @abstractmethod
    def _shape_master(self, flat: Tensor, param: Parameter) -> Tensor:
        """Return the view of a parameter's owned range that the inner optimizer is given."""

    @abstractmethod
    def _check_inner(self, build: Build, kinds: Sequence[Sequence[ProbeKind]]) -> None:
        """Refuse an inner optimizer that cannot work on such masters."""

    @abstractmethod
    def _average_grads(self, bucket: Tensor) -> None:
        """Make the owned range of a bucket of gradients the mean over dp. Collective."""

    @abstractmethod
    def _share_params(self, bucket: Tensor) -> None:
        """Give the owned range of a bucket of parameters to the ranks that need it. Collective."""

    @abstractmethod
    def _norm_axes(self) -> Sequence[Axis]:
        """Return the axes over which owned ranges differ."""

    @abstractmethod
    def _declare_tensor(self, slot: Slot, entity: ParamEntity, prefix: str, tensor: Tensor) -> ShardedBase:
        """Declare a state of the shape of the slot's master."""

    @abstractmethod
    def _declare_scalar(self, slot: Slot, entity: ParamEntity, prefix: str, scalar: Tensor) -> ShardedTensor:
        """Declare a 0-dim state of the slot's whole parameter."""

    @property
    def _device(self) -> torch.device:
        return self.buffers[0].grad.device if self.buffers else torch.device("cpu")

    def _all_pieces(self) -> Iterator[Piece]:
        for pieces in self._pieces:
            yield from pieces

    def _cut_slots(self, owned: Sequence[Sequence[Span]]) -> list[Slot]:
        position = {id(param): position for position, param in enumerate(self._params)}
        slots: list[Slot] = []
        for buffer, pieces, ranges in zip(self.buffers, self._pieces, owned, strict=True):
            positions = [position[id(param)] for param in buffer.params]
            slots += cut_slots(buffer, pieces, ranges, positions=positions, shape=self._shape_master)
        return sorted(slots, key=lambda slot: slot.position)

    def _reduce_grads(self) -> set[int]:
        """Make the owned gradients the mean over dp; return the ids of parameters that any rank touched."""
        sum_over_model_ranks(self._params, self.groups)
        for buffer in self.buffers:
            for bucket in buffer.layout.buckets:
                self._average_grads(buffer.grad[bucket.as_slice()])
        flags = {id(p): t for b in self.buffers for p, t in zip(b.params, b.touched, strict=True)}
        agreed = agree_on_touched(self._params, [flags[id(p)] for p in self._params], self.groups)
        return {id(param) for param, touched in zip(self._params, agreed, strict=True) if touched}

    def _declare(self, slot: Slot, entity: ParamEntity, name: str, value: Any) -> ShardedBase:
        prefix = f"optimizer.state.{name}"
        if self._is_elementwise(slot, name, value):
            return self._declare_tensor(slot, entity, prefix, value)
        return self._declare_scalar(slot, entity, prefix, _as_scalar(value))

    def _is_elementwise(self, slot: Slot, name: str, value: Any) -> bool:
        """Whether a state has a value for each element of the slot's master, not one for all."""
        of_one_shape = isinstance(value, Tensor) and value.shape == slot.master.shape
        return of_one_shape and name not in slot.scalars

    def _check_params_are_rounded_masters(self) -> None:
        wrong = [slot for slot in self._slots if slot.has_copy and not _rounds_to(slot.master, slot.data)]
        if wrong:
            lines = [str(slot) for slot in wrong]
            raise MismatchError(
                f"The model's weights are not the {wrong[0].data.dtype} values of the master weights that "
                f"were loaded, for {len(wrong)} parameters:\n{truncated_list(lines)}\nLoad the model from "
                f"the same checkpoint before the optimizer. If the weights were meant to come from "
                f"elsewhere, call reload_model_params() to train on from them; if the dtype changed since "
                f"the checkpoint was saved, call sync_params() on all data-parallel ranks. All else is "
                f"restored.",
                rank=self.groups.rank,
            )


def _as_scalar(value: Tensor | float) -> Tensor:
    """Return a 0-dim tensor: a view of a tensor, so that loading fills it in place, or a copy of a number."""
    if isinstance(value, Tensor):
        return value.view(())
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _rounds_to(master: Tensor, data: Tensor) -> bool:
    # As bytes: a NaN of a run that diverged equals itself here.
    return torch.equal(master.to(data.dtype).view(torch.uint8), data.view(torch.uint8))
