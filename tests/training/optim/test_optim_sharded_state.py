"""The entities of parameters are found, and optimizer state is declared like them, or as arrays of its own.

The optimizers with arrays of their own keep the state of those that people use: factors of matrices in lists
(SOAP, Shampoo), norms of parameters (NovoGrad), and codes of 8 bits with a scale for each block
(bitsandbytes).
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

from megackpt import (
    DeclarationError,
    LocalNonpersistentObject,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    save,
)
from megackpt.entities import ShardedStateDict, is_main_replica
from megackpt.errors import OptimizerError
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    WholeMatrixOptimizer,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.optim.sharded_state import make_flat_optimizer_tensor, make_sharded_scalar
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import mark
from tests.support.optimizers import (
    SHAPES,
    SINGLE_PROCESS,
    PlainOptimizer,
    gather,
    loaded,
    make_model,
    model_state,
    random_arrays,
    scatter,
    tensors_of,
)


def stacked(param: Tensor, *, tp_rank: int = 0, dp_rank: int = 0) -> ShardedTensor:
    """Layer 2 of 5, rows split over 3 tp ranks."""
    return ShardedTensor.from_rank_offsets(
        "layers.w", param, (0, 2, 5), (1, tp_rank, 3), prepend_axis_num=1, replica_id=(0, 0, dp_rank)
    )


def test_entities_are_found_by_their_parameter() -> None:
    a, b, c, absent = (Parameter(torch.zeros(4)) for _ in range(4))
    factory = ShardedTensorFactory("c", c, lambda *x: [], lambda x: x)
    state = {
        "model": [
            {"a": ShardedTensor.from_rank_offsets("a", a)},
            ShardedLayout.split("b", b, 0, {"x": 1, "y": 3}),
        ],
        "c": factory,
        "other": ShardedObject("o", object(), (1,), (0,)),
        "lr": 3,
    }
    param_of = get_param_id_to_sharded_param_map(state, [c, absent, a, b])
    assert {i: e.key for i, e in param_of.items()} == {0: "c", 2: "a", 3: "b"}
    assert get_optim_param_to_id_map([c, a, c]) == {id(c): 0, id(a): 1}


def without_keep_vars(layer: nn.Linear) -> ShardedStateDict:
    return {key: ShardedTensor.from_rank_offsets(key, data) for key, data in layer.state_dict().items()}


def of_weight(replica_id: Any) -> Callable[[nn.Linear], ShardedStateDict]:
    return lambda layer: {"w": ShardedTensor.from_rank_offsets("w", layer.weight, replica_id=replica_id)}


def of_factory(layer: nn.Linear) -> ShardedStateDict:
    return {"f": ShardedTensorFactory("f", layer.weight, lambda *x: [], lambda x: x)}


@pytest.mark.parametrize(
    ("has_bias", "tp", "declare", "match"),
    [
        (True, 1, without_keep_vars, "without keep_vars=True: the data of 2.*bias.*weight.*keep_vars=True"),
        (True, 1, of_weight((0, 0, 0)), r"1 of the optimizer's 2.*parameter 1 of shape \(3,\).*Pass"),
        (False, 2, of_weight(1), "'w': replica_id 1 is a single number.*Give the tuple"),
        (False, 2, of_weight((0, 1)), r"'w': replica_id \(0, 1\) does not have the three.*Give all three"),
        (False, 1, of_factory, "'f': the build_fn.*no ShardedTensor.*Return at least one"),
    ],
)
def test_a_model_state_that_does_not_fit_is_rejected_with_the_way_to_build_it(
    has_bias: bool, tp: int, declare: Callable[[nn.Linear], ShardedStateDict], match: str
) -> None:
    layer, groups = nn.Linear(2, 3, bias=has_bias), ParallelGroups.offline(ParallelLayout(tp=tp), 0)
    if declare is without_keep_vars:
        with pytest.raises(DeclarationError, match=f"(?s){match}"):
            get_param_id_to_sharded_param_map(declare(layer), layer.parameters())
    optimizer = DistributedOptimizer(layer.parameters(), torch.optim.AdamW, groups)
    with pytest.raises(DeclarationError, match=f"(?s){match}"):
        optimizer.sharded_state_dict(declare(layer))


def test_a_model_state_of_another_model_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"None of the optimizer's 1 parameters.*keep_vars=True"):
        assert not get_param_id_to_sharded_param_map({}, [Parameter(torch.zeros(1))])


def test_a_whole_state_is_declared_like_its_parameter_in_its_own_dtype() -> None:
    param = Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    entity = make_sharded_optimizer_tensor(
        stacked(param, tp_rank=1), torch.ones(2, 3), "optimizer.state.exp_avg"
    )
    assert isinstance(entity, ShardedTensor)
    assert entity.key == "optimizer.state.exp_avg.layers.w"
    assert (entity.global_shape, entity.global_offset) == ((5, 6, 3), (2, 2, 0))
    assert entity.dtype == torch.float32
    with pytest.raises(DeclarationError, match=r"'optimizer.state.x.layers.w': data has shape \(4,\)"):
        make_sharded_optimizer_tensor(stacked(param), torch.ones(4), "optimizer.state.x")


def test_a_flat_shard_is_no_replica_over_dp() -> None:
    param = Parameter(torch.zeros(2, 3))
    entity = make_flat_optimizer_tensor(
        stacked(param, dp_rank=7), torch.ones(2), prefix="p", flattened_range=slice(3, 5), replica=(1, 2)
    )
    assert entity.replica_id == (1, 2, 0)
    assert entity.flattened_range == slice(3, 5)


@pytest.mark.parametrize("tp_rank", [0, 1, 2])
def test_a_number_is_stored_for_each_layer_by_the_first_tp_rank(tp_rank: int) -> None:
    param = Parameter(torch.zeros(2, 3))
    step = torch.tensor(4.0)
    entity = make_sharded_scalar(
        stacked(param, tp_rank=tp_rank), step, prefix="optimizer.state.step", replica=(0, 0, 0)
    )
    assert entity.key == "optimizer.state.step.layers.w"
    assert (entity.global_shape, entity.global_offset, entity.local_shape) == ((5,), (2,), ())
    assert entity.data is step
    assert is_main_replica(entity.replica_id) == (tp_rank == 0)


def test_the_state_of_a_plain_torch_optimizer_becomes_sharded() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model_sd = {k: ShardedTensor.from_rank_offsets(k, p) for k, p in model.state_dict(keep_vars=True).items()}
    ids = get_param_id_to_sharded_param_map(model_sd, model.parameters())

    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, ids)
    arrays = gather([state])
    assert sorted(arrays) == sorted(
        f"optimizer.state.{name}.{key}"
        for name in ("exp_avg", "exp_avg_sq", "step")
        for key in ("weight", "bias")
    )
    assert torch.equal(arrays["optimizer.state.exp_avg.weight"], optimizer.state[model.weight]["exp_avg"])
    assert arrays["optimizer.state.step.bias"] == 1
    (group,) = state["param_groups"]
    assert group["lr"] == 0.5
    assert isinstance(group["params"], LocalNonpersistentObject)
    assert group["params"].unwrap() == [0, 1]
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1]

    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, ids, exclude_keys=("step", "exp_avg"))
    assert {t.key for t in tensors_of(state)} == {
        f"optimizer.state.exp_avg_sq.{k}" for k in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("ids", "states", "match"),
    [
        ({}, {"exp_avg": torch.zeros(2)}, r"state for parameter 0, which is in no entity.*keep_vars=True"),
        (None, {"rule": "plain"}, r"'w': the optimizer state 'rule' is a str.*Name it in exclude_keys"),
    ],
)
def test_states_that_cannot_be_declared_are_rejected(ids: Any, states: dict[str, Any], match: str) -> None:
    entity = ShardedTensor.from_rank_offsets("w", Parameter(torch.zeros(2)))
    state = {"state": {0: states}, "param_groups": []}
    with pytest.raises(DeclarationError, match=match):
        optim_state_to_sharding_state(state, {0: entity} if ids is None else ids)


def test_states_of_a_factory_are_declared_as_of_states() -> None:
    """Also 0-dim ones, whose place is that of the parameter; the factory itself may store nothing."""
    param = Parameter(torch.zeros(2))
    shape = ShardedTensor.from_rank_offsets("w", param, (0, 1, 4), replica_id=(0, 0, 0), prepend_axis_num=1)
    factory = ShardedTensorFactory(
        "w", param, lambda *_: [], lambda _: param, (0, 0, 0), of_states=shape.without_data()
    )
    for own in (factory, shape):
        state = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": []}
        entities = get_param_id_to_sharded_param_map({"w": own}, [param])
        optim_state_to_sharding_state(state, entities)
        moment, step = state["state"][0]["exp_avg"], state["state"][0]["step"]  # type: ignore[call-overload]
        assert (moment.key, moment.global_shape) == ("optimizer.state.exp_avg.w", (4, 2))
        assert (moment.global_offset, moment.replica_id) == ((1, 0), (0, 0, 0))
        assert (step.key, step.global_shape, step.global_offset) == ("optimizer.state.step.w", (4,), (1,))


class Factors(PlainOptimizer):
    """A square factor for each dim of a matrix, as SOAP and Shampoo have; vectors have an empty list."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
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

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["exp_avg"], state["norm"] = torch.zeros_like(grad), float(grad.norm())
        state["norm"] = 0.9 * state["norm"] + 0.1 * float(grad.norm())
        momentum: Tensor = state["exp_avg"].mul_(0.9).add_(grad / (state["norm"] + 1e-8))
        return momentum


class Blocks(PlainOptimizer):
    """A momentum in codes of 8 bits with the largest value of each block of 256; small ones in float32."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
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


def assert_run_goes_on(source: Any, target: Any, factory: Any, path: Path, *, saved_after: int) -> None:
    """Compare a run that is saved and loaded with one that is not interrupted, bit for bit."""
    params, fresh = make_matrices(0), make_matrices(1)
    optimizer = source(params, factory, SINGLE_PROCESS)
    train(params, optimizer, range(saved_after))
    save({"model": declare(params), "optimizer": optimizer.sharded_state_dict(declare(params))}, path)

    resumed = target(fresh, factory, SINGLE_PROCESS)
    request = {"model": declare(fresh), "optimizer": resumed.sharded_state_dict(declare(fresh))}
    resumed.load_sharded_state_dict(load(request, path)["optimizer"])
    train(params, optimizer, range(saved_after, saved_after + 3))
    train(fresh, resumed, range(saved_after, saved_after + 3))
    for p, q in zip(params, fresh, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("source", "target"), [WHOLE, WHOLE[::-1]])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    source: Any, target: Any, factory: Any, saved_after: int, tmp_path: Path
) -> None:
    assert_run_goes_on(source, target, factory, tmp_path, saved_after=saved_after)


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
