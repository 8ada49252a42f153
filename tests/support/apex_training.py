"""Apex's optimizers on small parameters: they train, declare themselves, are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import ShardedTensor, load, save
from megackpt.integrations.apex import load_sharded_state_dict, sharded_state_dict
from megackpt.mapping import ShardedStateDict
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from tests.support import fake_apex

SHAPES = [(4, 6), (13,), (9, 10)]
SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)


def make_params(seed: int, dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def train(params: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def set_grads(params: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def declare(params: list[Parameter], dp: int = 0) -> ShardedStateDict:
    return {
        str(i): ShardedTensor.from_rank_offsets(f"p{i}", p, replica_id=(0, 0, dp))
        for i, p in enumerate(params)
    }


def are_equal(a: list[Parameter], b: list[Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def resume(
    params: list[Parameter], optimizer: Optimizer, path: Path, fresh: list[Parameter], into: Optimizer
) -> None:
    """Save one, and load it into the other."""
    model = declare(params)
    save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, path)
    model = declare(fresh)
    request = {"model": model, "optimizer": sharded_state_dict(into, model, is_loading=True)}
    load_sharded_state_dict(into, load(request, path)["optimizer"])


DISTRIBUTED: dict[str, dict[str, Any]] = {
    "float32 masters": {},
    "remainders": {"store_params": False, "store_param_remainders": True},
    "no masters": {"store_params": False},
    "bfloat16 states": {"dtype": torch.bfloat16},
}


def make_ranks(seed: int, size: int, name: str) -> tuple[list[list[Parameter]], list[Any]]:
    dtype = torch.float32 if name == "no masters" else torch.bfloat16
    params = [make_params(seed, dtype) for _ in range(size)]
    optimizers = [
        fake_apex.DistributedFusedAdam(groups_of(p), rank=rank, size=size, **DISTRIBUTED[name])
        for rank, p in enumerate(params)
    ]
    return params, optimizers


def train_ranks(params: list[list[Parameter]], optimizers: list[Any], steps: range) -> None:
    for step in steps:
        for p, optimizer in zip(params, optimizers, strict=True):
            set_grads(p, step)
            optimizer.step()
        fake_apex.share_params(optimizers)
