"""Jobs that train with every optimizer, save in the middle, and go on at another layout.

Gradients are random arrays, cut for each rank and equal on all ranks of dp, whose number is a power of two.
So every mean and sum over ranks is exact, whatever the layout, and no order of a reduction changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import CheckpointError, ShardedTensor, load, save
from megackpt.entities import ShardedStateDict
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer, WholeMatrixOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.support import expert_world
from tests.support.optimizers import SHAPES, make_model, model_state, random_arrays, tensors_of

SAVED_AFTER, STEPS = 2, 5
WRAPPERS: dict[str, type[MasterOptimizer]] = {
    "distributed": DistributedOptimizer,
    "owner": WholeMatrixOptimizer,
    "whole": MixedPrecisionOptimizer,
}


class GroupStepAdam(Optimizer):
    """Adam with `step` in the group, where fused optimizers have it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                unbiased = 1 - 0.99 ** group["step"]
                p.sub_(group["lr"] * state["exp_avg"] / ((state["exp_avg_sq"] / unbiased).sqrt() + 1e-8))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.01),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1),
    "SGD, momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, nesterov": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "RMSprop, centered": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.9),
    "NAdam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "RAdam": lambda g: torch.optim.RAdam(g, lr=0.01),
    "Adamax": lambda g: torch.optim.Adamax(g, lr=0.01),
    "step in the group": GroupStepAdam,
    "Adafactor": lambda g: torch.optim.Adafactor(g, lr=0.01),
    "Muon": lambda g: torch.optim.Muon(g, lr=0.02),
    "LBFGS": lambda g: torch.optim.LBFGS([p for group in g for p in group["params"]]),
}

Result = str | tuple[list[ShardedTensor], list[ShardedTensor]]
"""What a save of this rank stores after SAVED_AFTER and after STEPS steps, or the name of the error."""


class DenseJob:
    """The model of `optim_world`."""

    def __init__(self, groups: ParallelGroups, seed: int) -> None:
        self._groups = groups
        self._world = make_model(groups, random_arrays(SHAPES, seed), torch.bfloat16)
        self.params = [p.param for p in self._world]

    def state(self) -> ShardedStateDict:
        return model_state(self._world)

    def backward(self, step: int) -> None:
        grads = random_arrays(SHAPES, seed=100 + step)
        for p in self._world:
            p.param.grad = p.cut(grads).bfloat16() * self._share(p.param)

    def _share(self, param: Parameter) -> float:
        """The part of a gradient that this rank has, where ranks of tp or both ends of pp add theirs."""
        share = 1.0
        if is_marked(param, "sequence_parallel"):
            share /= self._groups.tp.size
        if is_marked(param, "shared_embedding") and self._groups.pp.size > 1:
            share /= 2
        return share


class MoeJob:
    """The model of `expert_world`."""

    def __init__(self, groups: ParallelGroups, seed: int) -> None:
        self._groups = groups
        self._model = expert_world.build(groups, expert_world.random_weights(seed), torch.bfloat16)
        self.params = list(self._model.parameters())

    def state(self) -> ShardedStateDict:
        return self._model.sharded_state_dict()

    def backward(self, step: int) -> None:
        grads = expert_world.build(self._groups, expert_world.random_weights(100 + step), torch.bfloat16)
        for param, grad in zip(self.params, grads.parameters(), strict=True):
            is_expert = is_marked(param, "expert_parallel")
            # Gradients of experts are summed over edp and divided by dp: see `grad_sync`.
            share = self._groups.dp_cp.size / self._groups.edp.size if is_expert else 1.0
            param.grad = grad.detach() * share


def optimizers_of(
    name: str, wrapper: str, params: Sequence[Parameter], groups: ParallelGroups
) -> list[MasterOptimizer]:
    """Return the optimizer; for Muon, which takes matrices only, with AdamW for the rest."""
    kind, factory = WRAPPERS[wrapper], OPTIMIZERS[name]
    if name != "Muon":
        return [kind(params, factory, groups)]
    # Biases of stacked experts have two dims, and are no matrices.
    not_matrices = ("shared_embedding", "stacked_experts")
    matrices = [p for p in params if p.ndim == 2 and not any(is_marked(p, flag) for flag in not_matrices)]
    rest = [p for p in params if not any(p is matrix for matrix in matrices)]
    return [kind(matrices, factory, groups), DistributedOptimizer(rest, OPTIMIZERS["AdamW"], groups)]


def run(
    names: Sequence[str], wrapper: str, layout: ParallelLayout, path: Path, resumes: bool, moe: bool
) -> dict[str, Result]:
    """Train with each optimizer from the start and save on the way, or resume what was saved; on one rank."""
    groups = ParallelGroups.create(layout)
    return {name: _run_one(name, wrapper, groups, path / name, resumes=resumes, moe=moe) for name in names}


def _run_one(
    name: str, wrapper: str, groups: ParallelGroups, path: Path, *, resumes: bool, moe: bool
) -> Result:
    job = (MoeJob if moe else DenseJob)(groups, seed=7 if resumes else 1)
    try:
        optimizers = optimizers_of(name, wrapper, job.params, groups)
        if resumes:
            state = load(_declare(job, optimizers), path)
            for index, optimizer in enumerate(optimizers):
                optimizer.load_sharded_state_dict(state["optimizers"][index])
        else:
            _train(job, optimizers, range(SAVED_AFTER))
            save(_declare(job, optimizers), path)
    except CheckpointError as error:
        return type(error).__name__
    saved = copies_of(_declare(job, optimizers))
    _train(job, optimizers, range(SAVED_AFTER, STEPS))
    return saved, copies_of(_declare(job, optimizers))


def _declare(job: DenseJob | MoeJob, optimizers: Sequence[MasterOptimizer]) -> ShardedStateDict:
    model = job.state()
    return {"model": model, "optimizers": {i: o.sharded_state_dict(model) for i, o in enumerate(optimizers)}}


def _train(job: DenseJob | MoeJob, optimizers: Sequence[MasterOptimizer], steps: range) -> None:
    for step in steps:
        job.backward(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def copies_of(state: ShardedStateDict) -> list[ShardedTensor]:
    copies = []
    for tensor in tensors_of(state):
        data: Tensor | None = tensor.data
        copies.append(tensor.with_data(None if data is None else data.detach().clone()))
    return copies
