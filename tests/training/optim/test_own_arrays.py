"""Optimizer state that has not the shape of its parameter: stored as arrays of its own.

The optimizers here keep the state of those that people use: factors of matrices in lists (SOAP, Shampoo),
norms of parameters (NovoGrad), and codes of 8 bits with a scale for each block (bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import MismatchError, OptimizerError, ShardedTensor, load, save
from megackpt.mapping import ShardedStateDict
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer, WholeMatrixOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel.attributes import mark
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.testing.world import SimulatedWorld
from tests.support.optimizers import SHAPES, gather, loaded, make_model, model_state, random_arrays, scatter

SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)


class PlainOptimizer(Optimizer):
    """Calls `update` for each parameter with a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p.grad, self.state[p]))

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Factors(PlainOptimizer):
    """A square factor for each dim of a matrix, as SOAP and Shampoo have; vectors have an empty list."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = 0
            state["GG"] = [torch.eye(n) for n in grad.shape] if grad.ndim == 2 else [[]]
            state["exp_avg"] = torch.zeros_like(grad)
        state["step"] += 1
        momentum: Tensor = state["exp_avg"].lerp_(grad, 0.1)
        if grad.ndim != 2:
            return momentum
        left, right = state["GG"]
        left.lerp_(grad @ grad.T, 0.1)
        right.lerp_(grad.T @ grad, 0.1)
        preconditioned: Tensor = left @ momentum @ right
        return preconditioned


class Norms(PlainOptimizer):
    """One norm for each parameter, a plain number, as NovoGrad has."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["exp_avg"], state["norm"] = torch.zeros_like(grad), float(grad.norm())
        state["norm"] = 0.9 * state["norm"] + 0.1 * float(grad.norm())
        momentum: Tensor = state["exp_avg"].mul_(0.9).add_(grad / (state["norm"] + 1e-8))
        return momentum


class Blocks(PlainOptimizer):
    """A momentum in codes of 8 bits with the largest value of each block of 256; small ones in float32."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if grad.numel() < 4096:
            small: Tensor = state.setdefault("state1", torch.zeros_like(grad))
            return small.mul_(0.9).add_(grad)
        if not state:
            state["state1"] = torch.zeros_like(grad, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(-(-grad.numel() // 256))
        scale = state["absmax1"].repeat_interleave(256)[: grad.numel()].view(grad.shape)
        momentum: Tensor = (state["state1"].float() - 128) / 127 * scale * 0.9 + grad
        blocks = nn.functional.pad(momentum.view(-1), (0, -grad.numel() % 256)).view(-1, 256)
        state["absmax1"].copy_(blocks.abs().amax(1))
        scale = state["absmax1"].repeat_interleave(256)[: grad.numel()].view(grad.shape)
        state["state1"].copy_((momentum / scale * 127).round() + 128)
        return momentum


def adafactor(groups: Any) -> Optimizer:
    return torch.optim.Adafactor(groups, lr=0.01)


FACTORIES: list[Callable[[Any], Optimizer]] = [Factors, Norms, Blocks, adafactor]
WHOLE = [MixedPrecisionOptimizer, WholeMatrixOptimizer]


def make_matrices(seed: int) -> list[Parameter]:
    """A square matrix, whose factors have its own shape, a large and a flat one, a vector, and a number."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 6), (70, 90), (3, 8), (5,), ()]
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(params: list[Parameter], optimizer: MasterOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def declare(params: list[Parameter]) -> ShardedStateDict:
    return {f"p{i}": ShardedTensor.from_rank_offsets(f"p{i}", p) for i, p in enumerate(params)}


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("source", "target"), [WHOLE, WHOLE[::-1]])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    source: Any, target: Any, factory: Any, saved_after: int, tmp_path: Path
) -> None:
    params, fresh = make_matrices(0), make_matrices(1)
    optimizer = source(params, factory, SINGLE_PROCESS)
    train(params, optimizer, range(saved_after))
    save({"model": declare(params), "optimizer": optimizer.sharded_state_dict(declare(params))}, tmp_path)

    resumed = target(fresh, factory, SINGLE_PROCESS)
    request = {"model": declare(fresh), "optimizer": resumed.sharded_state_dict(declare(fresh))}
    resumed.load_sharded_state_dict(load(request, tmp_path)["optimizer"])
    train(params, optimizer, range(saved_after, saved_after + 3))
    train(fresh, resumed, range(saved_after, saved_after + 3))
    for p, q in zip(params, fresh, strict=True):
        assert torch.equal(p, q)


def test_the_state_is_stored_in_arrays_of_the_state_s_own_shape() -> None:
    params = make_matrices(0)
    shapes = {}
    for factory in (Factors, Norms, Blocks, adafactor):
        optimizer = MixedPrecisionOptimizer(params, factory, SINGLE_PROCESS)
        train(params, optimizer, range(1))
        arrays = gather([optimizer.sharded_state_dict(declare(params))])
        shapes[factory.__name__] = {key: (tuple(a.shape), a.dtype) for key, a in arrays.items()}
    prefix = "optimizer.state"
    assert shapes["Factors"][f"{prefix}.GG.0.p1"] == ((70, 70), torch.float32)
    assert shapes["Factors"][f"{prefix}.GG.1.p1"] == ((90, 90), torch.float32)
    assert f"{prefix}.GG.0.p3" not in shapes["Factors"]
    assert shapes["Norms"][f"{prefix}.norm.p0"] == ((), torch.float64)
    assert shapes["Blocks"][f"{prefix}.state1.p1"] == ((70, 90), torch.uint8)
    assert shapes["Blocks"][f"{prefix}.absmax1.p1"] == ((25,), torch.float32)
    assert shapes["Blocks"][f"{prefix}.state1.p0"] == ((6, 6), torch.float32)
    assert shapes["adafactor"][f"{prefix}.row_var.p1"] == ((70, 1), torch.float32)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_a_distributed_optimizer_rejects_it_with_the_reason(factory: Any) -> None:
    with pytest.raises(OptimizerError, match=r"DistributedOptimizer cuts parameters.*MixedPrecision"):
        DistributedOptimizer(make_matrices(0), factory, SINGLE_PROCESS)


def a_rank(layout: ParallelLayout, rank: int, kind: Any) -> tuple[Any, MasterOptimizer]:
    groups = ParallelGroups.offline(layout, rank)
    params = make_model(groups, random_arrays(SHAPES, seed=1), torch.float32)
    return params, kind([p.param for p in params], Factors, groups)


def fill_by_slice(optimizer: MasterOptimizer) -> None:
    """Give each factor a value that says which layer and slice it belongs to."""
    for owned in optimizer._owned_params:
        for number, factor in enumerate(optimizer.inner.state[owned.master]["GG"]):
            if isinstance(factor, Tensor):
                factor.fill_(float(owned.data.sum()) + number)


@pytest.mark.parametrize("kind", WHOLE)
def test_each_layer_and_slice_keeps_its_own_array_when_dp_and_pp_change(kind: Any) -> None:
    source, target = ParallelLayout(tp=2, dp=3), ParallelLayout(tp=2, pp=2, dp=2)
    world = []
    for rank in range(source.world_size):
        params, optimizer = a_rank(source, rank, kind)
        fill_by_slice(optimizer)
        world.append(optimizer.sharded_state_dict(model_state(params)))
    arrays = gather(world)
    assert tuple(arrays["optimizer.state.GG.0.layers.fc2"].shape) == (4, 2, 12, 12)  # layers, tp, factor
    for rank in range(target.world_size):
        params, optimizer = a_rank(target, rank, kind)
        request = optimizer.sharded_state_dict(model_state(params))
        scatter(request, arrays)
        optimizer.load_sharded_state_dict(loaded(request))
        for owned in optimizer._owned_params:
            for number, factor in enumerate(optimizer.inner.state[owned.master]["GG"]):
                if isinstance(factor, Tensor):
                    assert torch.equal(factor, torch.full_like(factor, float(owned.data.sum()) + number))


def test_what_is_of_a_slice_has_an_axis_over_slices_also_where_it_has_the_shape_of_a_parameter() -> None:
    """A factor of a square slice, and a number that depends on the slice's values."""
    arrays = {}
    for factory in (Factors, Norms):
        world = []
        for rank in range(2):
            (param,) = make_matrices(rank)[:1]
            mark(param, "tensor_model_parallel")
            entity = ShardedTensor.from_rank_offsets("w", param, (0, rank, 2), replica_id=(0, 0, 0))
            groups = ParallelGroups.offline(ParallelLayout(tp=2), rank)
            optimizer = MixedPrecisionOptimizer([param], factory, groups)
            world.append(optimizer.sharded_state_dict({"w": entity}))
        arrays |= gather(world)
    assert arrays["optimizer.state.GG.0.w"].shape == (2, 6, 6)
    assert arrays["optimizer.state.exp_avg.w"].shape == (12, 6)
    assert arrays["optimizer.state.norm.w"].shape == (2,)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_owns_nothing_rejects_the_optimizer_like_the_others(rank: int) -> None:
    groups = ParallelGroups.offline(ParallelLayout(dp=2), rank)
    with pytest.raises(OptimizerError, match="Adafactor is not elementwise"):
        DistributedOptimizer([Parameter(torch.ones(5))], adafactor, groups)
    with pytest.raises(OptimizerError, match="cannot be made of flat ranges"):
        DistributedOptimizer([Parameter(torch.ones(5, 2))], matrices_only, groups)


def matrices_only(groups: Any) -> Optimizer:
    if any(p.ndim != 2 for group in groups for p in group["params"]):
        raise ValueError("It supports matrices only.")
    return torch.optim.SGD(groups, lr=0.1)


def test_another_tp_is_an_error_that_names_the_arrays(tmp_path: Path) -> None:
    def save_rank(rank: Any) -> None:
        params, optimizer = a_rank(ParallelLayout(tp=2), rank.rank, MixedPrecisionOptimizer)
        save({"optimizer": optimizer.sharded_state_dict(model_state(params))}, tmp_path, group=rank)

    SimulatedWorld(2).run(save_rank)
    params, optimizer = a_rank(ParallelLayout(), 0, MixedPrecisionOptimizer)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.GG"):
        load({"optimizer": optimizer.sharded_state_dict(model_state(params))}, tmp_path)
