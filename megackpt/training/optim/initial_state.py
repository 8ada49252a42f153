"""Creates the state of a torch optimizer before its first step.

A torch optimizer creates the state of a parameter in the first step that has a gradient for it, so the
`state_dict()` of a new one has nothing that a load could fill. `initialise_state` creates that state before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import OptimizerError


def initialise_state(optimizer: Optimizer) -> None:
    """Create the state of every parameter that has none, so that a load can fill `optimizer.state_dict()`.

    Call it on every rank after the model is sharded (`fully_shard`) and before `state_dict()`. Parameters,
    gradients, hyperparameters and existing state do not change, bit for bit. Frozen parameters get no state.
    It takes one step with gradients of zero and a learning rate of zero, and needs memory for a gradient and
    a copy of each parameter while it runs; hooks on `step` are called.

    The created values are placeholders for those of the checkpoint: counters and moments are zero, and other
    state has the values of such a step.

    Raises:
        OptimizerError: the optimizer cannot take such a step (LBFGS needs a closure).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in params if p.requires_grad and not optimizer.state.get(p)]
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
    for name, (value, copy) in kept.items():
        if isinstance(value, Tensor):
            value.detach().copy_(copy)
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
