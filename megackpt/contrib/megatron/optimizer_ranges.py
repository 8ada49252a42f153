"""State of Megatron-Core's distributed optimizer in its reshardable form, saved and loaded without a gather.

In the form `fully_reshardable` every state of a parameter is a global array like the parameter's own. A rank
owns ranges of flattened parameters. Megatron-Core gathers the state of all data-parallel ranks before a
save, and every rank asks a load for whole arrays. Here each rank declares its ranges as flat ranges of the
same global arrays. Keys, shapes and dtypes stay, so either form of the optimizer reads what the other wrote.

Source: Megatron-Core `optimizer.distrib_optimizer.DistributedOptimizer`, for the names of its attributes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megackpt.contrib.megatron.settings import OPTIONS
from megackpt.entities import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from megackpt.entities.layout import chunks_of_view
from megackpt.entities.sharded_tensor import declare_chunk
from megackpt.entities.tree import iter_leaves
from megackpt.errors import DeclarationError
from megackpt.plans.geometry import View
from megackpt.plans.geometry.view import Axis
from megackpt.training.optim import join_master, split_master

log = logging.getLogger(__name__)

MODULE = "megatron.core.optimizer.distrib_optimizer"
_SAVED = "sharded_param_state_fully_reshardable"
_LOADED = "load_parameter_state_from_fully_reshardable"
_NEEDED = (_SAVED, _LOADED, "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states")
_MOMENTS = ("exp_avg", "exp_avg_sq")  # what versions before 0.19 store, for any optimizer
_RANGES = "ranges"  # tells this form of a state dict from Megatron-Core's
_STORED = torch.float32  # dtype of the arrays on disk, whatever the optimizer keeps
_WAY_BACK = (
    "install(gather_optimizer=True) saves and loads in Megatron-Core's own form, which gathers the optimizer "
    "state of all data-parallel ranks."
)

Entity: TypeAlias = ShardedTensor | ShardedTensorFactory
Optimizer: TypeAlias = Any  # Megatron-Core's DistributedOptimizer, which is not imported here


def save_ranges_in(module: ModuleType) -> None:
    """Let `DistributedOptimizer` of a module save and load its ranges where `fully_reshardable` is asked for.

    Versions before 0.14 do not have that form. A class that has it, and lacks a method that is called here,
    keeps its own form, with a warning. Local.
    """
    cls = getattr(module, "DistributedOptimizer", None)
    if not hasattr(cls, _SAVED):
        return
    missing = [name for name in _NEEDED if not hasattr(cls, name)]
    if missing:
        log.warning(
            "This version of Megatron-Core has no DistributedOptimizer.%s. So with fully_reshardable its "
            "optimizer gathers the state of all data-parallel ranks at each save. Update megackpt.",
            missing[0],
        )
        return
    setattr(cls, _SAVED, _declaring_ranges(getattr(cls, _SAVED)))
    setattr(cls, _LOADED, _taking_ranges(getattr(cls, _LOADED)))


def _declaring_ranges(gathered: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state_fully_reshardable(
        self: Optimizer,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict | None:
        if OPTIONS.gather_optimizer:
            whole: ShardedStateDict | None = gathered(self, model_sharded_state_dict, is_loading, metadata)
            return whole
        return {_RANGES: declare_ranges(self, model_sharded_state_dict)}

    return sharded_param_state_fully_reshardable


def _taking_ranges(take_whole: Callable[..., None]) -> Callable[..., None]:
    def load_parameter_state_from_fully_reshardable(self: Optimizer, state_dict: StateDict) -> None:
        if _RANGES in (state_dict or {}):
            take_ranges(self, state_dict[_RANGES])
        else:
            take_whole(self, state_dict)

    return load_parameter_state_from_fully_reshardable


def declare_ranges(optimizer: Optimizer, model_state: ShardedStateDict) -> dict[int, dict[str, Entity]]:
    """Return the state of the ranges that this rank owns, by number of the range. Local.

    Tensors are the optimizer's own where they have the stored dtype, and float32 copies in host memory
    elsewhere. An error in a declaration is raised by the save or load, on every rank.

    Args:
        optimizer: a DistributedOptimizer whose state exists.
        model_state: the model's sharded state dict, whose entities hold the parameters themselves.
    """
    kinds = (ShardedTensor, ShardedTensorFactory)
    entities = {id(leaf.data): leaf for _, leaf in iter_leaves(model_state) if isinstance(leaf, kinds)}
    names = ("param", *getattr(optimizer, "optimizer_state_keys", _MOMENTS))
    declared = {}
    for number, (param, owned) in enumerate(_owned_ranges(optimizer)):
        try:
            range_of_param = _OwnedRange.from_entity(entities.get(id(param)), param, owned, optimizer)
            states = optimizer._get_main_param_and_optimizer_states(param)
            if _has_remainders(states):
                states["param"] = join_master(_flat(param)[owned].cpu(), states["param"].cpu())
            declared[number] = {name: range_of_param.declare(name, states) for name in names}
        except DeclarationError as error:
            declared[number] = {"rejected": _rejected(error)}
    return declared


@torch.no_grad()
def take_ranges(optimizer: Optimizer, loaded: dict[int, dict[str, Tensor]]) -> None:
    """Set the optimizer's state to loaded ranges, in the order of `declare_ranges`. Local."""
    ranges = [
        (param, _flat(param)[owned], dict(loaded[number]))
        for number, (param, owned) in enumerate(_owned_ranges(optimizer))
    ]
    has_remainders = any(
        _has_remainders(optimizer._get_main_param_and_optimizer_states(param)) for param, *_ in ranges
    )
    if has_remainders:
        masters = [(states["param"].to(weight.device), weight) for _, weight, states in ranges]
        are_remainders = _are_remainders(masters)
        for (master, weight), (*_, states) in zip(masters, ranges, strict=True):
            if are_remainders:
                states["param"] = master.to(torch.int16)
            else:
                own_weight, states["param"] = split_master(master)
                weight.copy_(own_weight)
    for param, _, states in ranges:
        optimizer._set_main_param_and_optimizer_states(param, states)
    update_offloaded = getattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
    if update_offloaded is not None:  # of `--optimizer-cpu-offload`
        update_offloaded()


def _has_remainders(states: dict[str, Tensor]) -> bool:
    """Return whether masters are Transformer Engine's: what their bf16 weights lack of float32."""
    return "param" in states and states["param"].dtype == torch.int16


def _flat(param: Tensor) -> Tensor:
    return param.detach().view(-1)


def _are_remainders(masters: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether loaded masters are remainders, which Megatron-Core's gathered form stores as float32.

    Nothing in a checkpoint says so. Whole masters have the bits of the weights, which a run loads first.
    Remainders have not, and all of them are whole numbers.

    Args:
        masters: the loaded masters of this rank, each with its weight in the model.
    """
    if all(torch.equal(split_master(loaded)[0], weight) for loaded, weight in masters):
        return False
    are_whole_numbers = all(
        torch.equal(loaded.to(torch.int16).to(loaded.dtype), loaded) for loaded, _ in masters
    )
    if are_whole_numbers:
        log.warning(
            "The masters of the checkpoint are whole numbers, and do not round to the weights of the model. "
            "They are taken to be the remainders that Megatron-Core's own form stores. Load the model first."
        )
    return are_whole_numbers


def _owned_ranges(optimizer: Optimizer) -> Iterator[tuple[Tensor, slice]]:
    """Yield the parameters that this rank owns a part of, with the range in the flattened parameter."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, slice(ranges["param"].start, ranges["param"].end)


@dataclass(frozen=True, slots=True)
class _OwnedRange:
    """The elements of one parameter that a rank owns.

    Attributes:
        entity: the model's declaration of the parameter.
        shape: local shape of the parameter.
        owned: which slice of the flattened parameter the rank owns.
        replica_id: of all states. The ranks of the data-parallel group have different ranges, and no copies.
    """

    entity: Entity
    shape: tuple[int, ...]
    owned: slice
    replica_id: ReplicaId

    @classmethod
    def from_entity(
        cls, entity: Entity | None, param: Tensor, owned: slice, optimizer: Optimizer
    ) -> _OwnedRange:
        shape = tuple(param.shape)
        if entity is None:
            raise DeclarationError(
                f"The optimizer's parameter of shape {shape} is in no entity of the model's sharded state "
                f"dict. Build that with keep_vars=True, of the model that this optimizer trains. {_WAY_BACK}"
            )
        replica_id = entity.replica_id
        if not isinstance(replica_id, tuple) or len(replica_id) != 3:
            raise DeclarationError(
                f"{entity.key!r}: replica_id {replica_id} does not have the three elements of Megatron-Core "
                f"(pipeline, tensor and data parallel), of which the last is not that of a range. "
                f"Declare all three. {_WAY_BACK}",
                key=entity.key,
            )
        instance = getattr(optimizer, "distributed_optimizer_instance_id", 0)
        return cls(entity, shape, owned, (*replica_id[:2], instance))

    def declare(self, name: str, states: dict[str, Tensor]) -> Entity:
        """Declare one state, under `optimizer.state.<name>.<key of the parameter>`."""
        key = f"optimizer.state.{name}.{self.entity.key}"
        if name not in states:
            raise DeclarationError(
                f"{key!r}: the optimizer has no {name!r} for this parameter, but {sorted(states)}; Megatron-"
                f"Core's form fully_reshardable stores {name!r} of each. Take a step before the save, or use "
                f"an optimizer that has it, such as adam.",
                key=key,
            )
        data = states[name].detach()
        if data.dtype != _STORED:
            data = data.cpu().to(_STORED)
        if isinstance(self.entity, ShardedTensor):
            return self.entity.retarget(
                key=key, data=data, replica_id=self.replica_id, flattened_range=self.owned
            )
        return ShardedTensorFactory(key, data, self._build_parts, self._merge_parts(data), self.replica_id)

    def _build_parts(
        self, key: str, data: Tensor | None, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Declare what the range has of each tensor that the parameter's factory makes.

        The factory gets a stand-in without memory. Its views tell which elements each tensor has.
        """
        del flattened_range  # of the entity, which is not flat
        assert isinstance(self.entity, ShardedTensorFactory)
        whole = torch.empty(self.shape, dtype=_STORED, device="meta")
        parts = _tensors_of(self.entity.build_fn(key, whole, replica_id, None))
        if any(not _is_view(part.data, whole) for part in parts) or _numel(parts) != whole.numel():
            raise DeclarationError(
                f"{key!r}: the factory of this parameter copies its elements, or leaves some out, so it does "
                f"not tell where the elements of a range are stored. Let build_fn return views. {_WAY_BACK}",
                key=key,
            )
        return [
            declare_chunk(replace(part, data=None), chunk)
            for part in parts
            for chunk in chunks_of_view(_view_of(part.data), data, self.owned)
        ]

    def _merge_parts(self, data: Tensor) -> Callable[[list[Tensor]], Tensor]:
        def merge(loaded: list[Tensor]) -> Tensor:
            targets = self._build_parts("merged", data, self.replica_id, None)
            for target, part in zip(targets, loaded, strict=True):
                if target.data is not None and target.data.data_ptr() != part.data_ptr():
                    target.data.copy_(part)  # a load into other memory than that of the optimizer
            return data

        return merge


def _tensors_of(built: Any) -> list[ShardedTensor]:
    """Return the tensors in what a factory has built, with those of factories in it."""
    tensors: list[ShardedTensor] = []
    for _, leaf in iter_leaves({"built": built}):
        if isinstance(leaf, ShardedTensorFactory):
            tensors += _tensors_of(leaf.build())
        elif isinstance(leaf, ShardedTensor):
            tensors.append(leaf)
    return tensors


def _numel(parts: list[ShardedTensor]) -> int:
    return sum(math.prod(part.local_shape) for part in parts)


def _is_view(part: Tensor | None, whole: Tensor) -> bool:
    return part is not None and part.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _view_of(part: Tensor | None) -> View:
    """Return where the elements of a view are in the memory that it shares with the whole tensor."""
    assert part is not None
    numel = int(part.untyped_storage().nbytes()) // part.element_size()
    axes = tuple(Axis(0, step, extent) for step, extent in zip(part.stride(), part.shape, strict=True))
    return View((numel,), (int(part.storage_offset()),), axes)


def _rejected(error: DeclarationError) -> ShardedTensorFactory:
    """Return an entity that raises an error when it is saved or loaded, where all ranks learn of it."""

    def reject(*_: Any) -> Any:
        raise error

    return ShardedTensorFactory(error.key or "optimizer.state", None, reject, reject)
