"""Optimizer state that every rank of a layout declares, in one process, against global arrays.

Saving at any layout gives the same global arrays, and loading them at any layout gives every rank its part;
together: what one layout saved any other loads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.optim.owned_params import OwnedParam
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from tests.support.optimizers import (
    PARAM_SHAPES,
    SHAPES,
    Arrays,
    WorldParam,
    gather,
    loaded,
    make_model,
    model_state,
    random_arrays,
    scatter,
)

Kind = type[MasterOptimizer]
KINDS = [DistributedOptimizer, MixedPrecisionOptimizer]
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp=3),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(pp=2, dp=4),
    ParallelLayout(tp=2, pp=2, dp=5),
    ParallelLayout(tp=4, pp=4),
]
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))


def build_rank(
    kind: Kind, layout: ParallelLayout, rank: int, weights: Arrays, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[WorldParam], MasterOptimizer]:
    groups = ParallelGroups.offline(layout, rank)
    params = make_model(groups, weights, dtype)
    # A bucket of 700 elements makes several buckets, so that slices of dp ranks cut parameters everywhere.
    return params, kind([p.param for p in params], adamw, groups, bucket_size=700)


def part(optimizer: MasterOptimizer, params: list[WorldParam], owned: OwnedParam, arrays: Arrays) -> Tensor:
    """What the owned should hold of global arrays: cut for the rank, then for the owned range."""
    world = next(p for p in params if p.param is owned.param)
    flat = world.cut(arrays).reshape(-1)[owned.flat_range.as_slice()]
    return flat.view(owned.master.shape)


def number(params: list[WorldParam], owned: OwnedParam, numbers: Arrays) -> Tensor:
    return next(p for p in params if p.param is owned.param).cut_number(numbers)


class Expected:
    """Global arrays of everything that is stored."""

    def __init__(self) -> None:
        self.states = {
            state: random_arrays(SHAPES, seed) for seed, state in enumerate(("fp32_param", *MOMENTS))
        }
        self.steps = {
            key: torch.arange(1, 1 + max(1, torch.Size(shape).numel()), dtype=torch.float32).view(shape)
            + 10 * i
            for i, (key, shape) in enumerate(PARAM_SHAPES.items())
        }

    def arrays(self, *, with_masters: bool = True) -> Arrays:
        named = {
            f"optimizer.state.{state}.{key}": array
            for state, arrays in self.states.items()
            for key, array in arrays.items()
            if with_masters or state != "fp32_param"
        }
        return named | {f"optimizer.state.step.{key}": steps for key, steps in self.steps.items()}


def fill(expected: Expected, params: list[WorldParam], optimizer: MasterOptimizer) -> None:
    for owned in optimizer._owned_params:
        state = optimizer.inner.state[owned.master]
        owned.master.copy_(part(optimizer, params, owned, expected.states["fp32_param"]))
        for moment in MOMENTS:
            state[moment].copy_(part(optimizer, params, owned, expected.states[moment]))
        state["step"].copy_(number(params, owned, expected.steps))


def assert_equal_arrays(got: Arrays, expected: Arrays) -> None:
    assert sorted(got) == sorted(expected)
    for key, array in expected.items():
        assert torch.equal(got[key], array), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_declares_the_same_global_arrays_each_element_once(
    kind: Kind, layout: ParallelLayout
) -> None:
    expected, world = Expected(), []
    for rank in range(layout.world_size):
        params, optimizer = build_rank(kind, layout, rank, expected.states["fp32_param"])
        fill(expected, params, optimizer)
        world.append(optimizer.sharded_state_dict(model_state(params)))
    assert_equal_arrays(gather(world), expected.arrays())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_loads_its_part_of_the_global_arrays(kind: Kind, layout: ParallelLayout) -> None:
    expected = Expected()
    for rank in range(layout.world_size):
        params, optimizer = build_rank(kind, layout, rank, random_arrays(SHAPES, seed=99))
        request = optimizer.sharded_state_dict(model_state(params), is_loading=True)
        scatter(request, expected.arrays())
        load_weights(params, expected.states["fp32_param"])
        optimizer.load_sharded_state_dict(loaded(request))
        for owned in optimizer._owned_params:
            state = optimizer.inner.state[owned.master]
            assert torch.equal(owned.master, part(optimizer, params, owned, expected.states["fp32_param"]))
            for moment in MOMENTS:
                assert torch.equal(state[moment], part(optimizer, params, owned, expected.states[moment]))
            assert torch.equal(state["step"], number(params, owned, expected.steps))
        for p in params:
            assert torch.equal(p.param, p.cut(expected.states["fp32_param"]).bfloat16())


def load_weights(params: list[WorldParam], weights: Arrays) -> None:
    for p in params:
        p.param.detach().copy_(p.cut(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_parameters_are_their_own_masters_and_stored_once(kind: Kind) -> None:
    expected, world = Expected(), []
    layout = ParallelLayout(tp=2, dp=3)
    for rank in range(layout.world_size):
        weights = expected.states["fp32_param"]
        params, optimizer = build_rank(kind, layout, rank, weights, dtype=torch.float32)
        assert all(owned.master.data_ptr() == owned.data.data_ptr() for owned in optimizer._owned_params)
        fill(expected, params, optimizer)
        world.append(optimizer.sharded_state_dict(model_state(params)))
    assert_equal_arrays(gather(world), expected.arrays(with_masters=False))


def test_the_main_copy_of_a_number_is_with_the_rank_with_the_first_element() -> None:
    layout = ParallelLayout(tp=2, dp=4)
    owners: dict[str, list[int]] = {}
    for rank in range(layout.world_size):
        params, optimizer = build_rank(DistributedOptimizer, layout, rank, random_arrays(SHAPES, seed=0))
        state = optimizer.sharded_state_dict(model_state(params))["state"]
        for owned in optimizer._owned_params:
            step = state[owned.position]["step"]
            if not any(step.replica_id):
                owners.setdefault(f"{step.key}{step.global_offset}", []).append(rank)
                assert owned.flat_range.start == 0
                assert optimizer.groups.tp.rank == 0
    assert len(owners) == 2 + 4 * 4
    assert all(len(ranks) == 1 for ranks in owners.values())


def test_ranks_without_a_part_of_a_parameter_declare_nothing_of_it() -> None:
    layout = ParallelLayout(dp=5)
    for rank in range(layout.world_size):
        params, optimizer = build_rank(DistributedOptimizer, layout, rank, random_arrays(SHAPES, seed=0))
        state = optimizer.sharded_state_dict(model_state(params))["state"]
        assert len(state) < len(params)
        assert all(set(states) == {"fp32_param", "step", *MOMENTS} for states in state.values())
