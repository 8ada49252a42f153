"""Dense and expert parameters and their optimizer, saved at one layout, loaded at another and saved again.

The groups of the optimizer have no names, and stand in another order where they are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import load_plain_tensors
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled, tries_all
from tests.support.expert_world import TinyMoE, build, random_weights

LAYOUTS = {
    "1": ParallelLayout(),
    "EP8": ParallelLayout(dp=8, ep=8),
    "TP2xETP1xEP4xDP4": ParallelLayout(tp=2, dp=4, ep=4, etp=1),
    "TP2xCP2xETP4xPP2": ParallelLayout(tp=2, cp=2, etp=4, pp=2),
    "CP2xEP2xPP2xVPP2": ParallelLayout(cp=2, dp=2, ep=2, pp=2, vpp=2),
    "DP3": ParallelLayout(dp=3),
}
RATES = {"matrices": 0.01, "vectors": 0.02, "head": 0.03}


def build_rank(
    layout: ParallelLayout, seed: int, order: list[str], kind: type[MasterOptimizer]
) -> tuple[TinyMoE, MasterOptimizer]:
    groups = ParallelGroups.create(layout)
    model = build(groups, random_weights(seed), torch.bfloat16)
    members: dict[str, list[Any]] = {name: [] for name in order}
    for name, param in model.named_parameters():
        members["head" if "head" in name else "vectors" if "norm" in name else "matrices"].append(param)
    optimizer = kind(
        [{"params": members[name]} for name in order],
        lambda g: torch.optim.AdamW(g, lr=0.5),
        groups,
        bucket_size=301,  # shards begin and end at odd places of parameters
    )
    return model, optimizer


def state_of(model: TinyMoE, optimizer: MasterOptimizer, **how: bool) -> dict[str, Any]:
    declared = model.sharded_state_dict()
    return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared, **how)}


def train_and_save(layout: ParallelLayout, directory: Path) -> None:
    """Two steps make moments and step counters that no fresh optimizer has."""
    model, optimizer = build_rank(layout, 1, list(RATES), DistributedOptimizer)
    for group, rate in zip(optimizer.param_groups, RATES.values(), strict=True):
        group["lr"] = rate
    generator = torch.Generator().manual_seed(5 + optimizer.groups.rank)
    for _ in range(2):
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    megackpt.save(state_of(model, optimizer), directory)
    megackpt.save(state_of(model, optimizer, gathered=True), directory / "gathered")


def load_and_save(layout: ParallelLayout, kind: type[MasterOptimizer], source: Path, target: Path) -> None:
    """Load into a model of another seed, with the groups in another order, and save again."""
    order = ["head", "matrices", "vectors"]
    model, optimizer = build_rank(layout, 2, order, kind)
    loaded = megackpt.load(state_of(model, optimizer), source)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [RATES[name] for name in order]
    megackpt.save(state_of(model, optimizer), target)


def assert_equal(first: Path, second: Path) -> None:
    a, b = load_plain_tensors(first), load_plain_tensors(second)
    assert a.keys() == b.keys()
    for key in a:
        if ".param_group." not in key:
            assert torch.equal(as_bits(a[key]), as_bits(b[key])), key
    assert any(key.endswith("exp_avg.layers.experts.fc1.gate") for key in a)
    assert all(bool((a[key] == 2).all()) for key in a if ".step." in key)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> dict[str, Path]:
    saved = {name: tmp_path_factory.mktemp("pairs") / name for name in LAYOUTS}
    for name, layout in LAYOUTS.items():
        rank_pool.run(train_and_save, layout.world_size, layout, saved[name])
    return saved


@sampled(6)
@pytest.mark.parametrize("shift", range(1, len(LAYOUTS)))
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_one_layout_saved_another_loads_and_saves_bit_equal(
    source: str,
    shift: int,
    sources: dict[str, Path],
    rank_pool: RankPool,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    names = list(LAYOUTS)
    target = names[(names.index(source) + shift) % len(names)]
    if shift > 1 and not tries_all():
        pytest.skip("not in the sample of layout pairs; --all runs all 30")
    kind = DistributedOptimizer if shift % 2 else MixedPrecisionOptimizer
    layout = LAYOUTS[target]
    rank_pool.run(load_and_save, layout.world_size, layout, kind, sources[source], tmp_path)
    assert_equal(sources[source], tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_state_is_the_same_arrays(name: str, sources: dict[str, Path]) -> None:
    assert_equal(sources[name], sources[name] / "gathered")
