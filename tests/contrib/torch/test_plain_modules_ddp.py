"""DistributedDataParallel saved and resumed as docs/plain-modules.md says, by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megackpt
from megackpt import Checkpointer, CommonStateError, LoadOptions, SaveOptions
from megackpt.testing.ranks import RankPool

RANK_0S = SaveOptions(rank0_values=("model.*running_*",))


def build(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 64))
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed * 100 + dist.get_rank())  # each rank its own batch
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def bits(model: DistributedDataParallel) -> bytes:
    state = model.module.state_dict()
    return b"".join(t.numpy().tobytes() for name, t in state.items() if "running" not in name)


def _save_and_go_on(root: str) -> tuple[bytes, bool]:
    model, optimizer = build(1)
    for seed in range(2):
        train_step(model, optimizer, seed)
    rejected = False
    try:
        megackpt.save(state_of(model, optimizer), f"{root}/rejected")
    except CommonStateError as error:
        rejected = "model['1.running_mean']" in str(error)
    megackpt.save(state_of(model, optimizer), f"{root}/sync", options=RANK_0S)
    with Checkpointer(f"{root}/async", async_save=True, save_options=RANK_0S) as checkpointer:
        for step in (1, 2):  # the second takes the plan of the first
            checkpointer.save(step, state_of(model, optimizer))
            checkpointer.wait()
    train_step(model, optimizer, 2)
    return bits(model), rejected


def _resume(location: str, exchange: Any) -> bytes:
    model, optimizer = build(2)
    options = LoadOptions(exchange=exchange)
    loaded = megackpt.load(state_of(model, optimizer), location, options=options)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train_step(model, optimizer, 2)
    return bits(model)


def test_training_goes_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_save_and_go_on, 2, str(tmp_path))
    assert [rejected for _, rejected in results] == [True, True]
    trained = results[0][0]
    for location, exchange in (("sync", "direct"), ("async/iter_0000002", "all_to_all")):
        data = sorted(file.stat().st_size for file in (tmp_path / location / "data").iterdir())
        assert len(data) == 2
        assert data[1] < 2 * data[0]  # both wrote
        assert rank_pool.run(_resume, 2, str(tmp_path / location), exchange) == [trained, trained]
