"""Optimizer state that every rank of a layout declares, in one process, against global arrays.

Every element of every parameter has one owner. Saving at any layout gives the same global arrays, and loading
them at any layout gives every rank its part. The layouts of the last law have all seven axes: dense
parameters are cut into flat ranges over dp x cp, those of experts over edp.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megackpt import ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import ShardedStateDict
from megackpt.errors import GeometryError
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.optim.owned_params import OwnedParam
from megackpt.training.optim.ranges import BufferLayout, FlatRange, plan_buffer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from tests.support.effort import few
from tests.support.expert_world import TinyMoE
from tests.support.optimizers import (
    PARAM_SHAPES,
    SHAPES,
    Arrays,
    WorldParam,
    elements_of,
    gather,
    loaded,
    make_model,
    model_state,
    random_arrays,
    scatter,
    tensors_of,
)

layouts = st.builds(
    plan_buffer,
    st.lists(st.integers(0, 300), max_size=12),
    dp=st.integers(1, 9),
    bucket_size=st.integers(1, 500),
    alignment=st.sampled_from([1, 2, 7, 64]),
)


@given(layouts)
def test_owned_ranges_tile_every_parameter_exactly_once(layout: BufferLayout) -> None:
    owned = [layout.owned_ranges(rank) for rank in range(layout.dp)]
    for index, param in enumerate(layout.params):
        elements = [e for ranges in owned for e in range(ranges[index].start, ranges[index].stop)]
        assert elements == list(range(param.numel))


@given(layouts)
def test_an_owned_range_lies_in_the_owned_slices_of_the_buffer(layout: BufferLayout) -> None:
    for rank in range(layout.dp):
        elements = {e for s in layout.owned_slices(rank) for e in range(s.start, s.stop)}
        for param, owned in zip(layout.params, layout.owned_ranges(rank), strict=True):
            assert {param.start + e for e in range(owned.start, owned.stop)} <= elements


@given(layouts)
def test_owned_slices_are_equal_and_tile_every_bucket(layout: BufferLayout) -> None:
    for index, bucket in enumerate(layout.buckets):
        slices = [layout.owned_slices(rank)[index] for rank in range(layout.dp)]
        assert len({s.numel for s in slices}) == 1
        assert [e for s in slices for e in range(s.start, s.stop)] == list(range(bucket.start, bucket.stop))


@given(
    numels=st.lists(st.integers(0, 300), max_size=12),
    dp=st.integers(1, 9),
    bucket_size=st.integers(1, 500),
    alignment=st.sampled_from([1, 2, 7, 64]),
)
def test_parameters_are_apart_aligned_and_whole_in_one_bucket(
    numels: list[int], dp: int, bucket_size: int, alignment: int
) -> None:
    layout = plan_buffer(numels, dp=dp, bucket_size=bucket_size, alignment=alignment)
    assert [p.numel for p in layout.params] == numels
    assert all(p.start % alignment == 0 for p in layout.params)
    placed = [p for p in reversed(layout.params) if p.numel]
    assert all(a.stop <= b.start for a, b in itertools.pairwise(placed))
    for param in placed:
        home = [b for b in layout.buckets if b.start <= param.start and param.stop <= b.stop]
        assert len(home) == 1
        others = [p for p in placed if home[0].start <= p.start < home[0].stop]
        used = max(p.stop for p in others) - home[0].start
        assert used <= bucket_size or len(others) == 1


def test_parameters_are_packed_in_reverse_order_of_registration() -> None:
    layout = plan_buffer([10, 20, 30], dp=1, bucket_size=50, alignment=1)
    assert layout.params == (FlatRange(50, 60), FlatRange(30, 50), FlatRange(0, 30))
    assert layout.buckets == (FlatRange(0, 50), FlatRange(50, 60))


def test_sizes_that_cannot_be_packed_raise_an_error() -> None:
    with pytest.raises(GeometryError, match=r"sizes \[-1\] for dp=2.*Give sizes >= 0"):
        plan_buffer([-1], dp=2, bucket_size=10)
    with pytest.raises(GeometryError, match=r"dp=0.*others >= 1"):
        plan_buffer([1], dp=0, bucket_size=10)


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


ANY_KIND = st.sampled_from([DistributedOptimizer, MixedPrecisionOptimizer])
MOST_RANKS = 8  # of a simulated world: each is a thread
EXAMPLES = few(12, of=2000)  # about 0.2 s each


def _divisors(size: int) -> list[int]:
    return [n for n in (1, 2, 4) if size % n == 0]


@st.composite
def expert_layouts(draw: st.DrawFn) -> ParallelLayout:
    """Return a layout whose etp, ep and edp need not have anything to do with tp, cp and dp."""
    pp = draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    tp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    dp = draw(st.integers(1, max(1, min(3, MOST_RANKS // (pp * tp * cp)))))
    stage = tp * cp * dp
    etp = draw(st.sampled_from(_divisors(stage)))
    ep = draw(st.sampled_from(_divisors(stage // etp)))
    return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, etp=etp, ep=ep)


def rank_state(
    kind: Kind, layout: ParallelLayout, rank: int, bucket_size: int, dtype: torch.dtype
) -> tuple[MasterOptimizer, ShardedStateDict]:
    groups = ParallelGroups.offline(layout, rank)
    model = TinyMoE(groups).to(dtype)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = kind(
        [{"params": matrices, "name": "matrices"}, {"params": others, "name": "others"}],
        lambda g: torch.optim.AdamW(g, lr=0.1),
        groups,
        bucket_size=bucket_size,
    )
    declared = model.sharded_state_dict()
    return optimizer, {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}


def whole_arrays(dtype: torch.dtype, seed: int) -> Arrays:
    """Return global arrays of everything that is stored; bf16 weights are the rounded masters."""
    _, state = rank_state(DistributedOptimizer, ParallelLayout(), 0, 1000, dtype)
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for tensor in tensors_of(state):
        values = torch.randn(math.prod(tensor.global_shape), generator=generator) * 100
        arrays[tensor.key] = values.view(tensor.global_shape).to(tensor.dtype)
    for key in list(arrays):
        if (master := f"optimizer.state.fp32_param.{key}") in arrays:
            arrays[key] = arrays[master].to(dtype)
    return arrays


# Bounds on time are off: the machine that runs this may be busy.
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=expert_layouts(),
    target=expert_layouts(),
    kinds=st.tuples(ANY_KIND, ANY_KIND),
    bucket_sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_any_layout_of_experts_loads_the_optimizer_that_any_other_saved(
    source: ParallelLayout,
    target: ParallelLayout,
    kinds: tuple[Kind, Kind],
    bucket_sizes: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    arrays, store = whole_arrays(dtype, seed), MemoryStore()

    def save_rank(group: Group) -> None:
        _, state = rank_state(kinds[0], source, group.rank, bucket_sizes[0], dtype)
        scatter(state, arrays)
        save(state, store, group=group)

    def load_rank(group: Group) -> list[ShardedTensor]:
        optimizer, state = rank_state(kinds[1], target, group.rank, bucket_sizes[1], dtype)
        loaded = load(state, store, group=group)
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        return tensors_of(
            {"optimizer": optimizer.sharded_state_dict(state["model"]), "model": state["model"]}
        )

    SimulatedWorld(source.world_size).run(save_rank)
    for of_rank in SimulatedWorld(target.world_size).run(load_rank):
        for tensor in of_rank:
            wanted = arrays[tensor.key].reshape(-1)[elements_of(tensor)]
            assert tensor.data is not None
            assert torch.equal(as_bits(tensor.data).reshape(-1), as_bits(wanted)), tensor.key
