"""The state of an optimizer of torch before its first step.

An optimizer of torch makes the state of a parameter in the first step that has a gradient for it, so the
`state_dict()` of a fresh one asks a load for nothing. `initialise_state` makes that state beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import OptimizerError


def initialise_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter that has none: then `optimizer.state_dict()` can be loaded into.

    Parameters, gradients, hyperparameters and state that exists already stay as they are, bit for bit. Call
    it on every rank after the model is sharded (`fully_shard`) and before `state_dict()`. It takes one step
    with gradients of zero and a learning rate of zero, and needs memory for a gradient and a copy of each
    parameter while it runs; hooks on `step` are called. Frozen parameters get no state.

    The values that it makes are placeholders for those of the checkpoint: counters and moments are zero, what
    else an optimizer keeps is what such a step makes of it.

    Raises:
        OptimizerError: the optimizer cannot take such a step (LBFGS needs a closure).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in params if p.requires_grad and not optimizer.state.get(p)]
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS makes its state in a step with a closure, which evaluates the model, so it cannot be made "
            "here. Take one step before loading, then load the parameters and the state over it."
        )
    if not fresh:
        return
    grads = [p.grad for p in params]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    with torch.no_grad():
        values = [p.detach().clone() for p in fresh]
    try:
        for param in params:
            param.grad = None
        for param in fresh:
            param.grad = _zero_grad(optimizer, param)
        for group in optimizer.param_groups:
            group.update(_harmless(group))
        optimizer.step()
    except Exception as error:
        for param in fresh:
            optimizer.state.pop(param, None)
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot take a step with gradients of zero: {type(error).__name__}: "
            f"{error}. Take one step before loading, then load the parameters and the state over it."
        ) from error
    finally:
        with torch.no_grad():
            for param, value in zip(fresh, values, strict=True):
                param.detach().copy_(value)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, kept in zip(optimizer.param_groups, settings, strict=True):
            group.update(kept)
    for param in fresh:
        _reset_counter(optimizer.state.get(param, {}))


def _zero_grad(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return a gradient of zeros: a sparse one without elements where the optimizer takes no other."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(param, layout=torch.sparse_coo)
    return torch.zeros_like(param)


def _harmless(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group by which a step moves nothing."""
    changed: dict[str, Any] = {}
    for name in ("lr", "weight_decay"):
        value = group.get(name)
        if isinstance(value, Tensor):
            changed[name] = torch.zeros_like(value)
        elif isinstance(value, (int, float)):
            changed[name] = 0.0
    return changed


def _reset_counter(state: dict[str, Any]) -> None:
    step = state.get("step")
    if isinstance(step, Tensor):
        step.zero_()
    elif isinstance(step, (int, float)):
        state["step"] = type(step)(0)
