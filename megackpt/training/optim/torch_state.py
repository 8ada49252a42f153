"""Turns the `state_dict()` of a torch optimizer into declarations.

Source: Megatron-Core `dist_checkpointing.optimizer.optim_state_to_sharding_state`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.entities import LocalNonpersistentObject, ShardedObject, StateDict
from megackpt.errors import DeclarationError, OptimizerError
from megackpt.training.optim.inner_optimizer import STEP
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    cuts_of_entity,
    make_own_array,
    make_sharded_optimizer_tensor,
    make_sharded_scalar,
    replica_of,
)

# Creates the state of a torch optimizer before its first step.
#
# A torch optimizer creates the state of a parameter in the first step that has a gradient for it, so the
# `state_dict()` of a new one has nothing that a load could fill. `initialise_state` creates that state
# before.


def initialise_state(optimizer: Optimizer, *, frozen: bool = False) -> None:
    """Create the state of every parameter that has none, so that a load can fill `optimizer.state_dict()`.

    Call it on every rank after the model is sharded (`fully_shard`) and before `state_dict()`. Parameters,
    gradients, hyperparameters and existing state do not change, bit for bit. Frozen parameters get no state,
    unless `frozen` is set: they may have been trained before they were frozen.
    It takes one step with gradients of zero and a learning rate of zero, and needs memory for a gradient and
    a copy of each parameter while it runs; hooks on `step` are called.

    The created values are placeholders for those of the checkpoint: counters and moments are zero, and other
    state has the values of such a step.

    Raises:
        OptimizerError: the optimizer cannot take such a step (LBFGS needs a closure).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in params if (p.requires_grad or frozen) and not optimizer.state.get(p)]
    _check_steps_without_closure(optimizer)
    if not fresh:
        return
    with _restored(optimizer, params, fresh):
        _create_by_step(optimizer, params, fresh)
    for param in fresh:
        _reset_counter(optimizer.state.get(param, {}))


def _check_steps_without_closure(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS creates its state in a step with a closure, which evaluates the model, so it cannot be "
            "created here. Take one step before loading, then load the parameters and the state over it."
        )


@contextmanager
def _restored(optimizer: Optimizer, params: Sequence[Tensor], fresh: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters (those without state), gradients and settings their values back at the end."""
    grads = [p.grad for p in params]
    settings = [_settings_with_copies(group) for group in optimizer.param_groups]
    with torch.no_grad():
        values = [p.detach().clone() for p in fresh]
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value in zip(fresh, values, strict=True):
                param.detach().copy_(value)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, kept in zip(optimizer.param_groups, settings, strict=True):
            _restore_settings(group, kept)


def _create_by_step(optimizer: Optimizer, params: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """Take a step without effect; if it fails, remove the state that it has begun to create."""
    try:
        _step_without_effect(optimizer, params, fresh)
    except Exception as error:
        for param in fresh:
            optimizer.state.pop(param, None)
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot take a step with gradients of zero: {type(error).__name__}: "
            f"{error}. Take one step before loading, then load the parameters and the state over it."
        ) from error


def _step_without_effect(optimizer: Optimizer, params: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """Take a step with gradients of zero, for the parameters without state only, and a learning rate of 0."""
    for param in params:
        param.grad = None
    for param in fresh:
        param.grad = _zero_grad(optimizer, param)
    for group in optimizer.param_groups:
        group.update(_settings_without_effect(group))
    optimizer.step()


def _zero_grad(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return a gradient of zeros; a sparse one without elements for optimizers that take sparse ones only."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(param, layout=torch.sparse_coo)
    return torch.zeros_like(param)


def _settings_without_effect(group: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a group with which a step changes no parameter."""
    changed: dict[str, Any] = {}
    for name in ("lr", "weight_decay"):
        value = group.get(name)
        if isinstance(value, Tensor):
            changed[name] = torch.zeros_like(value)
        elif isinstance(value, (int, float)):
            changed[name] = 0.0
    return changed


def _settings_with_copies(group: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each setting, and of tensors a copy, as a step may change them in place."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {name: (value, _copy(value)) for name, value in settings.items()}


def _restore_settings(group: dict[str, Any], kept: dict[str, tuple[Any, Any]]) -> None:
    """Undo what the step has changed; a counter that it has added (of fused optimizers) becomes zero."""
    for name, (value, before) in kept.items():
        if isinstance(value, Tensor):
            value.detach().copy_(before)
        group[name] = value
    if "step" not in kept:
        _reset_counter(group)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _reset_counter(state: dict[str, Any]) -> None:
    step = state.get("step")
    if isinstance(step, Tensor):
        step.zero_()
    elif isinstance(step, (int, float)):
        state["step"] = type(step)(0)


_COUNTERS = frozenset({STEP, "mu_product", "mu", "eta"})
"""0-dim states of torch's optimizers that follow from the number of steps, so that all slices have the same.

Others, such as norms, are those of a slice.
"""


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ParamEntity],
    exclude_keys: Collection[str] = (),
) -> None:
    """Turn the `state_dict()` of a torch optimizer into a sharded state dict, in place. Local.

    States of the parameter's shape become entities keyed `optimizer.state.<state>.<model key>`, and `step` a
    number of its parameter. Tensors of other shapes (factors, norms, scales of blocks) become arrays of their
    own, with an axis for each axis that cuts the parameter: at other cuts a load is an error. Python numbers
    become objects, and None stays as it is. Members of lists and dicts have names such as `GG.0`; after a
    load they are where they were. States in exclude_keys are dropped. The lists of parameter ids in the
    groups are not stored, as ids have a meaning on this rank only.

    Raises:
        DeclarationError: a parameter with state has no entity, a state is of another type, or it has its own
            shape and the parameter is cut into slices of different sizes.
    """
    sharded: dict[int, dict[str, Any]] = {}
    arrays = _names_of_arrays(optim_state_dict["state"], id_to_sharded_param_map)
    for param_id, states in optim_state_dict["state"].items():
        if param_id not in id_to_sharded_param_map:
            raise DeclarationError(
                f"The optimizer has state for parameter {param_id}, which is in no entity of the model's "
                f"sharded state dict. Build that from the model that this optimizer trains, of the "
                f"parameters themselves (those of state_dict(keep_vars=True))."
            )
        entity = id_to_sharded_param_map[param_id]
        sharded[param_id] = {
            name: declare_state(entity, value, name, arrays)
            for name, value in states.items()
            if name not in exclude_keys
        }
    groups = [dict(group) for group in copy.deepcopy(optim_state_dict["param_groups"])]
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"] = sharded
    optim_state_dict["param_groups"] = groups


def _names_of_arrays(
    state: Mapping[Any, Mapping[str, Any]], entities: Mapping[int, ParamEntity]
) -> frozenset[str]:
    """Return the names of states that have another shape than some parameter.

    A factor of a square parameter has the parameter's shape by chance, but not that of the next one.
    """
    names = set()
    for param_id, states in state.items():
        param = entities[param_id].data if param_id in entities else None
        if param is not None:
            tensors = _flattened("", states)
            names |= {name for name, value in tensors if value.ndim > 0 and value.shape != param.shape}
    return frozenset(names)


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of all tensors."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _flattened(f"{name}.{key}" if name else str(key), member)
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _flattened(f"{name}.{number}", member)


def declare_state(entity: ParamEntity, value: Any, name: str, arrays: Collection[str]) -> Any:
    """Declare one state of a parameter: an entity, or a list or dict of them. Local.

    Args:
        entity: the parameter's.
        value: a tensor, a number, None, or a list or dict of them.
        name: of the state.
        arrays: names of states that are not elementwise although some have the parameter's shape.

    Raises:
        DeclarationError: see `optim_state_to_sharding_state`.
    """
    if value is None:
        return LocalNonpersistentObject(None)
    if isinstance(value, Mapping):  # bitsandbytes has one with all of its tensors
        return {key: declare_state(entity, member, f"{name}.{key}", arrays) for key, member in value.items()}
    if isinstance(value, list):
        names = [f"{name}.{i}" for i in range(len(value))]
        return [declare_state(entity, member, n, names) for n, member in zip(names, value, strict=True)]
    prefix = f"optimizer.state.{name}"
    if isinstance(value, bool | int | float):
        return _make_number(entity, value, prefix)
    if not isinstance(value, Tensor):
        raise DeclarationError(
            f"{entity.key!r}: the optimizer state {name!r} is a {type(value).__name__}. Only tensors, "
            f"numbers, and lists and dicts of them can be stored. Name it in exclude_keys.",
            key=entity.key,
        )
    if value.ndim == 0 and name in _COUNTERS and entity.data is not None and entity.data.ndim > 0:
        return make_sharded_scalar(entity, value, prefix=prefix, replica=replica_of(entity))
    if name not in arrays and (entity.data is None or value.shape == entity.data.shape):
        return make_sharded_optimizer_tensor(entity, value, prefix)
    return make_own_array(entity, value, prefix=prefix, cuts=_cuts(entity, name))


def _make_number(entity: ParamEntity, value: float, prefix: str) -> ShardedObject:
    """Declare a Python number of this rank's slice of a parameter; a load returns a number."""
    # An array of the same slice says which element of the array of objects this is.
    position = make_own_array(entity, torch.zeros(()), prefix=prefix, cuts=_cuts(entity, prefix))
    return ShardedObject(
        position.key, value, position.global_shape, position.global_offset, position.replica_id
    )


def _cuts(entity: ParamEntity, name: str) -> list[tuple[int, int]]:
    cuts = cuts_of_entity(entity)
    if cuts is None:
        raise DeclarationError(
            f"{entity.key!r}: the optimizer state {name!r} has not the shape of the parameter, and belongs "
            f"to a slice of it; but the slices are of different sizes, so that this one has no number. Cut "
            f"the parameter into equal slices, or name the state in exclude_keys.",
            key=entity.key,
        )
    return cuts
