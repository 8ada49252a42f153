"""Optimizers that update copies of the parameters in host memory.

They are Megatron-Core's HybridDeviceOptimizer and torchao's CPUOffloadOptimizer. Both give copies to torch
optimizers of their own, which have the state, often with a `step` for each parameter. A step writes the
copies over the parameters: after a load of the model alone, the first step writes the weights of construction
time.

    from megackpt.contrib import offload

    state = {"model": model_state, "optimizer": offload.sharded_state_dict(optimizer, model_state)}
    megackpt.save(state, path)

    declared = offload.sharded_state_dict(optimizer, model_state, is_loading=True)
    loaded = megackpt.load({"model": model_state, "optimizer": declared}, path)
    offload.load_sharded_state_dict(optimizer, loaded["optimizer"])  # after the model's weights

The keys are those of `megackpt.training.optim`. Optimizers are known by their attributes; nothing is
imported.

Source: Megatron-Core 0.16.1 `core/optimizer/cpu_offloading/hybrid_optimizer.py`; torchao 0.18
`optim/cpu_offload.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.contrib.group_settings import declare_settings, plain_settings, restore_settings
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import DeclarationError
from megackpt.training.optim import initialise_state, make_sharded_optimizer_tensor
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.param_groups import IMPLEMENTATION_OPTIONS, WhenDifferent
from megackpt.training.optim.sharded_state import find_param_entities
from megackpt.training.optim.torch_state import declare_state

_MASTER_IN_STATE = "master_param"  # HybridDeviceOptimizer puts the copy itself among the states
_OPTIONS_OF_OFFLOADING = frozenset(
    {
        "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads",
        "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
    }
)  # fmt: skip
"""What HybridDeviceOptimizer puts into its groups; another run may choose otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedParam:
    """A parameter and what its optimizer updates.

    Attributes:
        param: the model's parameter.
        copy: what is updated: a copy in host memory, a float32 copy, or the parameter itself.
        optimizer: the torch optimizer that updates it.
    """

    param: Parameter
    copy: Tensor
    optimizer: Optimizer

    @property
    def has_master(self) -> bool:
        """Whether the copy is more precise than the parameter, so that it has to be stored."""
        return self.copy.dtype == torch.float32 and self.param.dtype != torch.float32

    def states(self) -> dict[str, Any]:
        """Return name and value of the states, without the master."""
        return {k: v for k, v in self.optimizer.state[self.copy].items() if k != _MASTER_IN_STATE}


@torch.no_grad()
def sharded_state_dict(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict, is_loading: bool = False
) -> ShardedStateDict:
    """Declare masters, states, and the settings of the groups. Local.

    Args:
        optimizer: HybridDeviceOptimizer or CPUOffloadOptimizer.
        model_sharded_state_dict: of the model; its entities wrap the parameters.
        is_loading: whether to create state that a new optimizer does not have yet.

    Returns:
        `state` by position of the parameter and name; `param_groups` by name of the group, with the number of
        each parameter's group in `param_group_of` where groups have no names.

    Raises:
        DeclarationError: the optimizer is another one, has a parameter that is not declared, or, without
            is_loading, has taken no step.
    """
    members = _offloaded_params(optimizer)
    _create_states(members, is_loading=is_loading)
    params = [member.param for member in members]
    state: dict[int, dict[str, Any]] = {}
    for position, (member, entity) in enumerate(
        zip(members, find_param_entities(model_sharded_state_dict, params), strict=True)
    ):
        state[position] = {
            name: declare_state(entity, value, name, ()) for name, value in member.states().items()
        }
        if member.has_master:
            state[position][MASTER] = make_sharded_optimizer_tensor(
                entity, member.copy, f"optimizer.state.{MASTER}"
            )
    groups = _groups(optimizer, members)
    in_order = [param for group in groups for param in group["params"]]
    return {"state": state, **declare_settings(groups, in_order, model_sharded_state_dict)}


@torch.no_grad()
def load_sharded_state_dict(
    optimizer: Any, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
) -> None:
    """Restore what a load of `sharded_state_dict(..., is_loading=True)` returned. Local.

    Load the model before: copies of parameters that have no stored master are made from the parameters.
    when_different is as for the optimizers of `megackpt.training.optim`.

    Raises:
        MismatchError: the groups do not belong to those of the checkpoint, or are configured otherwise.
        DeclarationError: the optimizer is another one.
    """
    members = _offloaded_params(optimizer)
    _restore_settings(optimizer, members, loaded, when_different)
    for position, member in enumerate(members):
        values = loaded["state"].get(position, {})
        for name, current in member.states().items():
            if name in values:
                _write(member.optimizer.state[member.copy], name, current, values[name])
        if member.copy is not member.param:
            member.copy.detach().copy_(values.get(MASTER, member.param.detach()))
    if hasattr(optimizer, "_sync_sub_optimizers_state_to_hdo"):
        optimizer._sync_sub_optimizers_state_to_hdo()  # as after a step, so that `optimizer.state` has it


def _offloaded_params(optimizer: Any) -> list[OffloadedParam]:
    if all(hasattr(optimizer, name) for name in ("sub_optimizers", "inner_param_to_orig_param")):
        originals = optimizer.inner_param_to_orig_param
        return [
            OffloadedParam(param=originals[copy], copy=copy, optimizer=inner)
            for inner in optimizer.sub_optimizers
            for copy in _params(inner)
        ]
    if all(hasattr(optimizer, name) for name in ("optim_dict", "param_d2h_map", "d_opt")):
        on_host = [
            OffloadedParam(param=param, copy=optimizer.param_d2h_map[param], optimizer=inner)
            for param, inner in optimizer.optim_dict.items()
        ]
        on_device = [] if optimizer.d_opt is None else _params(optimizer.d_opt)
        return on_host + [
            OffloadedParam(param=param, copy=param, optimizer=optimizer.d_opt) for param in on_device
        ]
    raise DeclarationError(
        f"{type(optimizer).__module__}.{type(optimizer).__name__} is neither Megatron-Core's "
        f"HybridDeviceOptimizer nor torchao's CPUOffloadOptimizer. For others use megackpt.training.optim."
    )


def _params(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _create_states(members: Sequence[OffloadedParam], *, is_loading: bool) -> None:
    missing = [member for member in members if not member.optimizer.state.get(member.copy)]
    if missing and not is_loading:
        raise DeclarationError(
            f"the optimizer has no state for {len(missing)} of {len(members)} parameters. Save after the "
            f"first step, and leave out parameters that never get a gradient; to load, pass is_loading=True."
        )
    for inner in {id(member.optimizer): member.optimizer for member in missing}.values():
        _create_state(inner)


def _create_state(inner: Optimizer) -> None:
    """Create the state of an inner optimizer without a step of it, whose hooks would change parameters."""
    twins = [[torch.zeros_like(p).requires_grad_() for p in group["params"]] for group in inner.param_groups]
    groups = [{**group, "params": twin} for group, twin in zip(inner.param_groups, twins, strict=True)]
    other = type(inner)(groups)  # type: ignore[call-arg]
    initialise_state(other)
    for param, twin in zip(_params(inner), _params(other), strict=True):
        if not inner.state.get(param):
            inner.state[param] = other.state[twin]


def _groups(optimizer: Any, members: Sequence[OffloadedParam]) -> list[dict[str, Any]]:
    """Return the groups of parameters of the model, with the settings that are stored."""
    inner_group = dict(_inner_groups(members))
    if hasattr(optimizer, "sub_optimizers"):
        return [
            {**_stored_options({**inner_group[id(group["params"][0])], **group}), "params": group["params"]}
            for group in optimizer.param_groups
        ]
    # torchao makes a group of each parameter. Those with equal settings were one.
    merged: list[dict[str, Any]] = []
    for member in members:
        options = _stored_options(inner_group[id(member.param)])
        equal = [group for group in merged if plain_settings([group]) == plain_settings([options])]
        if not equal:
            equal = [{**options, "params": []}]
            merged += equal
        equal[0]["params"].append(member.param)
    return merged


def _inner_groups(members: Sequence[OffloadedParam]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the id of each parameter, and the group of its copy."""
    for member in members:
        for group in member.optimizer.param_groups:
            if any(copy is member.copy for copy in group["params"]):
                yield id(member.param), group


def _stored_options(group: dict[str, Any]) -> dict[str, Any]:
    left_out = _OPTIONS_OF_OFFLOADING | IMPLEMENTATION_OPTIONS | {"params"}
    return {option: value for option, value in group.items() if option not in left_out}


def _restore_settings(
    optimizer: Any, members: Sequence[OffloadedParam], loaded: StateDict, when_different: WhenDifferent
) -> None:
    groups = _groups(optimizer, members)
    restore_settings(groups, loaded, when_different=when_different)
    inner_group = dict(_inner_groups(members))
    for number, group in enumerate(groups):
        options = {option: value for option, value in group.items() if option != "params"}
        for param in group["params"]:
            inner_group[id(param)].update(options)
        if hasattr(optimizer, "sub_optimizers"):
            # Each step copies these into the inner groups, where a counter of steps must stay as it is.
            options.pop("step", None)
            optimizer.param_groups[number].update(options)


def _write(state: dict[str, Any], name: str, current: Any, loaded: Any) -> None:
    if not isinstance(current, Tensor):
        state[name] = loaded
    elif loaded.data_ptr() != current.data_ptr():
        current.copy_(loaded)
