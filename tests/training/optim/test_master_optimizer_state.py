"""State of the optimizers of one rank: what a load restores, and what it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from megackpt import MismatchError, MissingKeyError, ShardedTensor
from megackpt.optim import DistributedOptimizer
from tests.support.optim_training import (
    KINDS,
    OPTIMIZERS,
    SINGLE_PROCESS,
    Kind,
    assert_same_weights,
    declare,
    make_model,
    move,
    train,
)
from tests.support.optimizers import gather, loaded, scatter


@pytest.mark.parametrize("saved_after", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [KINDS, KINDS[::-1], KINDS[:1] * 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    source: Kind, target: Kind, name: str, saved_after: int
) -> None:
    model, fresh = make_model(), make_model(seed=7)
    optimizer = source(model.parameters(), OPTIMIZERS[name], SINGLE_PROCESS)
    train(model, optimizer, range(saved_after))
    resumed = target(fresh.parameters(), OPTIMIZERS[name], SINGLE_PROCESS)
    move(model, optimizer, fresh, resumed)
    train(fresh, resumed, range(saved_after, saved_after + 3))
    train(model, optimizer, range(saved_after, saved_after + 3))
    assert_same_weights(model, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_into_an_optimizer_that_has_trained_makes_it_the_saved_one(kind: Kind) -> None:
    for saved_after in (0, 2):
        model, other = make_model(), make_model(seed=7)
        optimizer = kind(model.parameters(), OPTIMIZERS["sgd_dampening"], SINGLE_PROCESS)
        train(model, optimizer, range(saved_after))
        trained = kind(other.parameters(), OPTIMIZERS["sgd_dampening"], SINGLE_PROCESS)
        train(other, trained, range(50, 53))
        move(model, optimizer, other, trained)
        train(model, optimizer, range(10, 12))
        train(other, trained, range(10, 12))
        assert_same_weights(model, other)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_keep_their_own_options_and_are_restored_by_name(kind: Kind) -> None:
    def grouped(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5, "name": "matrices"},
            {"params": [model[0].bias, model[2].bias, model.scale], "weight_decay": 0.0},
        ]

    model, reference, fresh = make_model(), make_model(), make_model(seed=7)
    optimizer = kind(grouped(model), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    train(model, optimizer, range(3))
    train(reference, torch.optim.AdamW(grouped(reference), lr=0.01), range(3))
    assert_same_weights(model, reference)

    optimizer.param_groups[0]["lr"] = 0.125
    stored = optimizer.sharded_state_dict(declare(model))["param_groups"]
    assert list(stored) == ["matrices", "1"]
    assert stored["matrices"]["lr"] == 0.125
    assert stored["matrices"]["betas"] == (0.9, 0.999)
    assert not {"params", "foreach", "fused", "capturable", "name"} & set(stored["1"])
    resumed = kind(grouped(fresh), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in resumed.param_groups] == [0.125, 0.01]
    assert [g["weight_decay"] for g in resumed.param_groups] == [0.5, 0.0]


def test_groups_of_another_name_are_rejected_and_nothing_is_changed() -> None:
    model = make_model()
    optimizer = DistributedOptimizer(
        [{"params": model.parameters(), "name": "all"}], OPTIMIZERS["adamw"], SINGLE_PROCESS
    )
    with pytest.raises(
        MismatchError, match=r"only in the checkpoint: \['0'\], only here: \['all'\].*same 'name'"
    ):
        optimizer.load_state_dict({"param_groups": {"0": {"lr": 3.0}}})
    assert optimizer.param_groups[0]["lr"] == 0.01
    with pytest.raises(MissingKeyError, match=r"'param_groups' is not in.*\['state'\].*Pass what state_dict"):
        optimizer.load_state_dict({"state": {}})


def test_weights_that_are_not_the_rounded_masters_are_rejected_after_load() -> None:
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16, seed=7)
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed = DistributedOptimizer(other.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    request = resumed.sharded_state_dict(declare(other))
    scatter(request, gather([optimizer.sharded_state_dict(declare(model))]))
    with pytest.raises(
        MismatchError,
        match=r"not the torch.bfloat16 values(.|\n)*'0.weight' of shape(.|\n)*Load the model from",
    ):
        resumed.load_sharded_state_dict(loaded(request))
    resumed.sync_params()
    assert_same_weights(model, other)


def test_masters_that_a_checkpoint_lacks_are_made_from_the_weights() -> None:
    model = make_model(torch.bfloat16)
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict(declare(model)))
    for states in answer["state"].values():
        del states["fp32_param"]
    model[0].weight.detach().fill_(3.0)
    optimizer.load_sharded_state_dict(answer)
    assert [bool((m == 3.0).all()) for m in optimizer.param_groups[0]["params"]] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_states_loaded_without_their_step_are_kept() -> None:
    w = Parameter(torch.ones(3))
    optimizer = DistributedOptimizer([w], lambda g: torch.optim.Adam(g, lr=0.0), SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict({"w": ShardedTensor.from_rank_offsets("w", w)}))
    del answer["state"][0]["step"]
    answer["state"][0]["exp_avg"].fill_(8.0)
    optimizer.load_sharded_state_dict(answer)
    w.grad = torch.zeros(3)
    optimizer.step()
    (state,) = optimizer.inner.state.values()
    assert state["exp_avg"].tolist() == pytest.approx([7.2] * 3)


def test_reload_model_params_trains_on_from_loaded_weights() -> None:
    model = make_model(torch.bfloat16)
    optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.SGD(g, lr=0.0), SINGLE_PROCESS)
    model.load_state_dict(make_model(torch.bfloat16, seed=7).state_dict())
    optimizer.reload_model_params()
    train(model, optimizer, range(1))
    assert_same_weights(model, make_model(torch.bfloat16, seed=7))


def test_loaded_tensors_of_another_size_are_rejected() -> None:
    model = make_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict(declare(model)))
    answer["state"][0]["exp_avg"] = torch.zeros(7)
    with pytest.raises(
        MismatchError, match=r"'exp_avg' of 'scale' of shape \(\) has 1 el.* but 7 were loaded. Load"
    ):
        optimizer.load_sharded_state_dict(answer)


def test_tensors_that_were_not_filled_in_place_are_copied() -> None:
    model, fresh = make_model(), make_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed = DistributedOptimizer(fresh.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    train(model, optimizer, range(2))
    fresh.load_state_dict(model.state_dict())
    resumed.load_sharded_state_dict(loaded(optimizer.sharded_state_dict(declare(model))))
    train(model, optimizer, range(2, 4))
    train(fresh, resumed, range(2, 4))
    assert_same_weights(model, fresh)
