"""A small model, optimizers of torch and of users, and their training on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.support.optimizers import gather, loaded, scatter

Kind = type[MasterOptimizer]
KINDS = [DistributedOptimizer, MixedPrecisionOptimizer]
SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)


class Lion(Optimizer):
    """A user's optimizer: elementwise, with a count of its steps that is a plain int."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"], state["momentum"] = 0, p.grad.clone()
                state["steps"] += 1
                p.sub_(group["lr"] * torch.sign(state["momentum"] * 0.9 + p.grad * 0.1))
                state["momentum"].lerp_(p.grad, 1.0 / (1 + state["steps"]))


class Lamb(Optimizer):
    """Scales by the norm of the whole parameter: not elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * p.norm() * p.grad / p.grad.norm())


class RowMoments(Optimizer):
    """Keeps one number for each row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.grad.new_zeros(p.shape[0], 2)


class Named(Optimizer):
    """Keeps a text."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["kind"] = "matrix"


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda g: torch.optim.Adam(g, lr=0.01),
    "adam_amsgrad_decay": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam_no_eps": lambda g: torch.optim.Adam(g, lr=0.01, eps=0.0),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.01),
    "adamw_tensor_lr": lambda g: torch.optim.AdamW(g, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "sgd_momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.9),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.01, weight_decay=0.1),
    "radam": lambda g: torch.optim.RAdam(g, lr=0.01),
    "adamax": lambda g: torch.optim.Adamax(g, lr=0.01),
    "adadelta": lambda g: torch.optim.Adadelta(g, lr=0.5),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.1, t0=1),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.01),
    "lion": lambda g: Lion(g, lr=0.01),
}


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    model.register_parameter("scale", Parameter(torch.tensor(1.5)))
    return model.to(dtype)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 6, generator=generator).to(dtype)
    (model(x) * model.scale).square().sum().backward()


def train(model: nn.Module, optimizer: Any, steps: Iterator[int] | range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def declare(model: nn.Module) -> ShardedStateDict:
    return {
        key: ShardedTensor.from_rank_offsets(key, p) for key, p in model.state_dict(keep_vars=True).items()
    }


def move(model: nn.Module, source: MasterOptimizer, fresh: nn.Module, target: MasterOptimizer) -> None:
    """Save model and optimizer, and load them into others."""
    stored = [{"model": declare(model), "optimizer": source.sharded_state_dict(declare(model))}]
    request = {"model": declare(fresh), "optimizer": target.sharded_state_dict(declare(fresh))}
    scatter(request, gather(stored))
    answer = loaded(request["optimizer"])
    answer["param_groups"] = stored[0]["optimizer"]["param_groups"]
    target.load_sharded_state_dict(answer)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
