"""The entities of parameters are found, and optimizer state is declared like them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.errors import DeclarationError
from megackpt.mapping import (
    LocalNonpersistentObject,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megackpt.optim import (
    DistributedOptimizer,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megackpt.optim.sharded_state import make_flat_optimizer_tensor, make_sharded_scalar
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from tests.support.optimizers import gather, tensors_of


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


def test_a_state_dict_without_keep_vars_is_rejected_with_the_way_to_build_it() -> None:
    model = nn.Linear(2, 3)
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in model.state_dict().items()}
    match = r"without keep_vars=True: the data of 2(.|\n)*bias(.|\n)*weight(.|\n)*state_dict\(keep_vars=True"
    with pytest.raises(DeclarationError, match=match):
        get_param_id_to_sharded_param_map(state, model.parameters())
    optimizer = DistributedOptimizer(
        model.parameters(), torch.optim.AdamW, ParallelGroups.offline(ParallelLayout(), 0)
    )
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in model.state_dict().items()}
    with pytest.raises(DeclarationError, match=match):
        optimizer.sharded_state_dict(state)


def test_a_model_state_that_lacks_a_parameter_is_rejected() -> None:
    model = nn.Linear(2, 3)
    optimizer = DistributedOptimizer(
        model.parameters(), torch.optim.AdamW, ParallelGroups.offline(ParallelLayout(), 0)
    )
    state = {"w": ShardedTensor.from_rank_offsets("w", model.weight)}
    with pytest.raises(
        DeclarationError, match=r"1 of the optimizer's 2(.|\n)*parameter 1 of shape \(3,\)(.|\n)*Pass"
    ):
        optimizer.sharded_state_dict(state)


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
        (
            None,
            {"rule": "plain"},
            r"'w': the optimizer state 'rule' is a str.*Name it in exclude_keys",
        ),
    ],
)
def test_states_that_cannot_be_declared_are_rejected(ids: Any, states: dict[str, Any], match: str) -> None:
    entity = ShardedTensor.from_rank_offsets("w", Parameter(torch.zeros(2)))
    state = {"state": {0: states}, "param_groups": []}
    with pytest.raises(DeclarationError, match=match):
        optim_state_to_sharding_state(state, {0: entity} if ids is None else ids)


@pytest.mark.parametrize(
    ("replica_id", "match"),
    [
        (1, r"'w': replica_id 1 is a single number.*Give the tuple"),
        ((0, 1), r"'w': replica_id \(0, 1\) does not have the three elements.*Give all three"),
    ],
)
def test_replica_ids_that_do_not_show_their_axes_are_rejected(replica_id: Any, match: str) -> None:
    param = Parameter(torch.zeros(2))
    optimizer = DistributedOptimizer(
        [param], torch.optim.AdamW, ParallelGroups.offline(ParallelLayout(tp=2), 0)
    )
    with pytest.raises(DeclarationError, match=match):
        optimizer.sharded_state_dict(
            {"w": ShardedTensor.from_rank_offsets("w", param, replica_id=replica_id)}
        )


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


def test_a_factory_that_declares_nothing_is_rejected() -> None:
    param = Parameter(torch.zeros(2))
    optimizer = DistributedOptimizer([param], torch.optim.AdamW, ParallelGroups.offline(ParallelLayout(), 0))
    factory = ShardedTensorFactory("f", param, lambda *x: [], lambda x: x)
    with pytest.raises(DeclarationError, match=r"'f': the build_fn.*no ShardedTensor.*Return at least one"):
        optimizer.sharded_state_dict({"f": factory})
