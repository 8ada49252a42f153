"""Experts that are modules, with their optimizer: a checkpoint has the same arrays at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt import load, load_plain_tensors, save
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import (
    ColumnParallelLinear,
    ExpertStack,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
    RowParallelLinear,
)
from megackpt.testing.world import SimulatedRank, SimulatedWorld

EXPERTS, HIDDEN, FFN = 4, 6, 8
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp=4, ep=4),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1),
    ParallelLayout(tp=1, dp=4, ep=2, etp=2),
    ParallelLayout(tp=2, cp=2, ep=1, etp=2),
]


class Expert(nn.Module):
    """A column layer and a row layer."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, FFN, groups)
        self.down = RowParallelLinear(FFN, HIDDEN, groups)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


def _build(layout: ParallelLayout, rank: int) -> tuple[MixtureOfExperts, DistributedOptimizer]:
    groups = ParallelGroups.offline(layout, rank)
    layer = MixtureOfExperts(
        Router(HIDDEN, EXPERTS, groups, RoutingOptions(bias_rate=0.1)),
        ExpertStack(lambda index: Expert(groups.experts), EXPERTS, groups),
        groups,
    )
    optimizer = DistributedOptimizer(layer.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), groups)
    return layer, optimizer


def _state(layer: MixtureOfExperts, optimizer: DistributedOptimizer) -> dict[str, Any]:
    model = layer.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)}


def _pass_on(source: Path, target: Path, layout: ParallelLayout) -> None:
    def one_rank(group: SimulatedRank) -> None:
        layer, optimizer = _build(layout, group.rank)
        loaded = load(_state(layer, optimizer), source, group=group)
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        save(_state(layer, optimizer), target, group=group)

    SimulatedWorld(layout.world_size).run(one_rank)


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_weights_biases_and_moments_are_the_same_at_every_layout(tmp_path: Path, index: int) -> None:
    torch.manual_seed(0)
    layer, optimizer = _build(ParallelLayout(), 0)
    for state in optimizer.inner.state.values():
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
    save(_state(layer, optimizer), tmp_path / "first")
    _pass_on(tmp_path / "first", tmp_path / "source", LAYOUTS[index])
    expected = load_plain_tensors(tmp_path / "first")
    assert expected["experts.up.weight"].shape == (EXPERTS, FFN, HIDDEN)
    assert expected["optimizer.state.exp_avg.experts.up.weight"].std() > 0.5
    for step in (1, 2):  # to two other layouts, by turns
        target = LAYOUTS[(index + step) % len(LAYOUTS)]
        _pass_on(tmp_path / "source", tmp_path / f"{step}", target)
        actual = load_plain_tensors(tmp_path / f"{step}")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
