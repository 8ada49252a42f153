"""FSDP2 and DistributedDataParallel: saved and resumed as the documents show it, bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megackpt
from megackpt import Checkpointer, LoadOptions, SaveOptions
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import COMPUTES, full, make, same, train_step

PAGE = Path(__file__).parents[3] / "docs" / "torch.md"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


def shown_functions() -> dict[str, Any]:
    """Run the block of the page that saves and resumes, and return what it defines."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if "def resume_training" in block)
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    return namespace


def build(mesh: str, name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(mesh, seed=seed)
    return model, OPTIMIZERS[name](model.parameters())


def _gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def _save_and_go_on(mesh: str, root: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        model, optimizer = build(mesh, name, 1)
        for seed in range(2):
            train_step(model, optimizer, seed=seed)
        shown_functions()["save_training"](model, optimizer, f"{root}/{name}")
        # Copied, as counters are no DTensors: the next step changes them.
        saved = copy.deepcopy(_gathered(model, optimizer))
        train_step(model, optimizer, seed=2)
        results[name] = saved, _gathered(model, optimizer)
    return results


def _resume(mesh: str, root: str, expected: dict[str, Any]) -> list[str]:
    differing = []
    for name, (saved, trained) in expected.items():
        model, optimizer = build(mesh, name, 2)
        shown_functions()["resume_training"](model, optimizer, f"{root}/{name}")
        differing += [f"{name} {path} loaded" for path in same(_gathered(model, optimizer), saved)]
        train_step(model, optimizer, seed=2)
        if mesh == "fsdp2":  # elsewhere sums are made in another order
            differing += [f"{name} {path} trained" for path in same(_gathered(model, optimizer), trained)]
    return differing


def _forget(mesh: str, root: str) -> str:
    model, optimizer = build(mesh, "sgd", 2)
    try:
        megackpt.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{root}/sgd")
    except megackpt.MissingKeyError as error:
        return str(error)
    return "loaded"


@pytest.mark.skipif(not COMPUTES, reason="this torch does not run fully_shard on the CPU")
def test_training_goes_on_bit_for_bit_and_at_another_mesh_with_the_same_state(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    expected = rank_pool.run(_save_and_go_on, 2, "fsdp2", str(tmp_path))[0]
    assert all(any("momentum" in p or "exp_avg" in p for p in saved) for saved, _ in expected.values())
    for mesh, ranks in (("fsdp2", 2), ("fsdp4", 4)):
        assert rank_pool.run(_resume, ranks, mesh, str(tmp_path), expected) == [[]] * ranks
    for message in rank_pool.run(_forget, 2, "fsdp2", str(tmp_path)):
        assert "'optimizer.state': " in message
        assert "initialise_state" in message


RANK_0S = SaveOptions(rank0_values=("model.*running_*",))


def build_ddp(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 64))
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed * 100 + dist.get_rank())  # each rank its own batch
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of_ddp(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def bits(model: DistributedDataParallel) -> bytes:
    state = model.module.state_dict()
    return b"".join(t.numpy().tobytes() for name, t in state.items() if "running" not in name)


def _save_ddp_and_go_on(root: str) -> bytes:
    model, optimizer = build_ddp(1)
    for seed in range(2):
        train_ddp(model, optimizer, seed)
    megackpt.save(state_of_ddp(model, optimizer), f"{root}/plain")  # rank 0's statistics, with a warning
    megackpt.save(state_of_ddp(model, optimizer), f"{root}/sync", options=RANK_0S)
    with Checkpointer(f"{root}/async", async_save=True, save_options=RANK_0S) as checkpointer:
        for step in (1, 2):  # the second takes the plan of the first
            checkpointer.save(step, state_of_ddp(model, optimizer))
            checkpointer.wait()
    train_ddp(model, optimizer, 2)
    return bits(model)


def _resume_ddp(location: str, exchange: Any) -> bytes:
    model, optimizer = build_ddp(2)
    options = LoadOptions(exchange=exchange)
    loaded = megackpt.load(state_of_ddp(model, optimizer), location, options=options)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train_ddp(model, optimizer, 2)
    return bits(model)


def test_ddp_goes_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_save_ddp_and_go_on, 2, str(tmp_path))
    trained = results[0]
    locations = (("plain", "direct"), ("sync", "direct"), ("async/iter_0000002", "all_to_all"))
    for location, exchange in locations:
        data = sorted(file.stat().st_size for file in (tmp_path / location / "data").iterdir())
        assert len(data) == 2
        assert data[1] < 2 * data[0]  # both wrote
        assert rank_pool.run(_resume_ddp, 2, str(tmp_path / location), exchange) == [trained, trained]
