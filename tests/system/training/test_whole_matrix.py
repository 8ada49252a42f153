"""Muon with owners of whole matrices, and a sibling Adam: saved at dp2, resumed at other dp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt import ShardedTensor, load, save
from megackpt.mapping import ShardedStateDict
from megackpt.optim import DistributedOptimizer, WholeMatrixOptimizer
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.testing.ranks import RankPool

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
]


class Job:
    """A bf16 model on every rank, Muon for its matrices and AdamW for the rest."""

    def __init__(self, dp: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 8)).bfloat16()
        self.groups = ParallelGroups.create(ParallelLayout(dp=dp))
        params = list(self.model.parameters())
        self.muon = WholeMatrixOptimizer([p for p in params if p.ndim == 2], _muon, self.groups)
        self.adam = DistributedOptimizer([p for p in params if p.ndim == 1], _adam, self.groups)

    def state(self) -> ShardedStateDict:
        replica = (0, 0, self.groups.dp.rank)
        model = {
            key: ShardedTensor.from_rank_offsets(key, p, replica_id=replica)
            for key, p in self.model.state_dict(keep_vars=True).items()
        }
        optimizers = {"muon": self.muon, "adam": self.adam}
        return {"model": model, **{name: o.sharded_state_dict(model) for name, o in optimizers.items()}}

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            # Each rank has the same gradient, and dp is a power of two: their mean is exact at any dp.
            generator = torch.Generator().manual_seed(step)
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            self.muon.step()
            self.adam.step()
            self.muon.zero_grad()
            self.adam.zero_grad()
        return self.weights()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def _muon(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=0.02)


def _adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def run_and_save(path: Path) -> tuple[list[Tensor], list[Tensor], int]:
    job = Job(2, seed=0)
    job.train(range(2))
    save(job.state(), path)
    saved = job.weights()
    return saved, job.train(range(2, 5)), len(job.muon.inner.state)


def resume(dp: int, path: Path) -> tuple[list[Tensor], list[Tensor], int]:
    job = Job(dp, seed=1)
    state = load(job.state(), path)
    if job.groups.dp.rank:  # as if this rank had not loaded the parameters that others own
        owned = {id(o.param) for o in job.muon._owned_params}
        for p in job.model.parameters():
            if p.ndim == 2 and id(p) not in owned:
                p.detach().zero_()
    job.muon.load_sharded_state_dict(state["muon"])
    job.adam.load_sharded_state_dict(state["adam"])
    restored = job.weights()
    return restored, job.train(range(2, 5)), len(job.muon.inner.state)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, dp: int, memory_path: Path
) -> None:
    whole = rank_pool.run(run_and_save, 2, memory_path)
    assert sorted(owned for *_, owned in whole) == [1, 2]  # of three matrices, packed by size
    for rank, (restored, weights, owned) in enumerate(rank_pool.run(resume, dp, dp, memory_path)):
        assert owned == {1: [3], 2: [1, 2], 4: [1, 1, 1, 0]}[dp][rank]
        assert all(torch.equal(a, b) for a, b in zip(restored, whole[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(weights, whole[0][1], strict=True))
