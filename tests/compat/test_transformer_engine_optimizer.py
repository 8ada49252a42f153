"""Optimizer state of Transformer Engine's parameters is the same at every layout, also if interleaved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import load, load_plain_tensors, save
from megackpt.integrations.transformer_engine import sharded_state_dict
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests import te_models
from tests.te_models import MODULES, build

LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, dp=2), ParallelLayout(dp=3), ParallelLayout(tp=4)]


@pytest.mark.parametrize("name", ["layer", "gated mlp", "linear split", "stack"])
def test_moments_are_the_same_at_every_layout(tmp_path: Path, name: str) -> None:
    make = te_models.layers if name == "stack" else MODULES[name]
    expected: dict[str, Any] = {}
    for step, layout in enumerate(LAYOUTS):
        groups = [ParallelGroups.offline(layout, rank) for rank in range(layout.world_size)]
        modules = [build(make, g, seed=step) for g in groups]
        optimizers = [
            DistributedOptimizer(m.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), g)
            for m, g in zip(modules, groups, strict=True)
        ]
        if step == 0:
            torch.manual_seed(0)
            for state in optimizers[0].inner.state.values():
                state["exp_avg"].normal_()
                state["exp_avg_sq"].uniform_()

        def one_rank(group: SimulatedRank) -> None:
            optimizer = optimizers[group.rank]  # noqa: B023 - run at once
            model = sharded_state_dict(modules[group.rank], groups[group.rank])  # noqa: B023
            whole = {"model": model, "optimizer": optimizer.sharded_state_dict(model)}
            if step:  # noqa: B023
                loaded = load(whole, tmp_path / f"{step - 1}", group=group)  # noqa: B023
                optimizer.load_sharded_state_dict(loaded["optimizer"])
                whole["optimizer"] = optimizer.sharded_state_dict(model)
            save(whole, tmp_path / f"{step}", group=group)  # noqa: B023

        SimulatedWorld(layout.world_size).run(one_rank)
        actual = load_plain_tensors(tmp_path / f"{step}")
        expected = expected or actual
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
    moments = [key for key in expected if key.startswith("optimizer.state.exp_avg.")]
    assert len(moments) == sum(not key.startswith("optimizer.") for key in expected)
    assert all(expected[key].std() > 0.5 for key in moments)
