"""FSDP2 with an optimizer of torch: saved and resumed as docs/integrations.md shows it, bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import COMPUTES, full, make, same, train_step

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


def shown_functions() -> dict[str, Any]:
    """Run the block of the page that saves and resumes, and return what it defines."""
    (block,) = (
        b
        for b in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        if "def resume_training" in b
    )
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    return namespace


def build(mesh: str, name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(mesh, seed=seed)
    return model, OPTIMIZERS[name](model.parameters())


def _save_and_go_on(mesh: str, root: str) -> dict[str, Any]:
    results = {}
    for name in OPTIMIZERS:
        model, optimizer = build(mesh, name, 1)
        for seed in range(2):
            train_step(model, optimizer, seed=seed)
        shown_functions()["save_training"](model, optimizer, f"{root}/{name}")
        saved = full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
        saved = copy.deepcopy(saved)  # counters are no DTensors: the next step changes them
        train_step(model, optimizer, seed=2)
        results[name] = (
            saved,
            full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}),
        )
    return results


def _resume(mesh: str, root: str, expected: dict[str, Any]) -> list[str]:
    differing = []
    for name, (saved, trained) in expected.items():
        model, optimizer = build(mesh, name, 2)
        shown_functions()["resume_training"](model, optimizer, f"{root}/{name}")
        state = full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
        differing += [f"{name} {path} loaded" for path in same(state, saved)]
        train_step(model, optimizer, seed=2)
        state = full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
        if mesh == "fsdp2":  # elsewhere sums are made in another order
            differing += [f"{name} {path} trained" for path in same(state, trained)]
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
