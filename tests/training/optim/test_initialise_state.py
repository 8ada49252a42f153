"""The state of a new optimizer: created without changing anything, and loaded from a checkpoint."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megackpt import KeyRule, LoadOptions, MissingKeyError, Policy, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.contrib.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)
from megackpt.errors import OptimizerError
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import initialise_state
from tests.support.optim_training import OPTIMIZERS as OPTIMIZERS_OF_TORCH

Build = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd dampening nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adam lr tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    **{name: OPTIMIZERS_OF_TORCH[name] for name in ("adamw", "nadam", "radam", "adamax", "adadelta")},
    **{name: OPTIMIZERS_OF_TORCH[name] for name in ("adagrad", "asgd", "rmsprop", "rprop")},
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def model_of() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([-0.0, 0.0, float("inf"), float("nan")])
    return model


def bits(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return {key: bits(child) for key, child in tree.items()}
    return [bits(child) for child in tree] if isinstance(tree, (list, tuple)) else tree


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_but_the_state_changes_and_a_loaded_run_goes_on_bit_for_bit(name: str) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    model[0].bias.grad = torch.ones(3)
    before = bits(list(model.parameters())), bits(optimizer.state_dict()["param_groups"])
    initialise_state(optimizer)
    assert (bits(list(model.parameters())), bits(optimizer.state_dict()["param_groups"])) == before
    assert model[0].bias.grad.tolist() == [1.0] * 3
    assert model[0].weight.grad is None

    trained, fresh = model_of(), model_of()
    whole, resumed = OPTIMIZERS[name](trained.parameters()), OPTIMIZERS[name](fresh.parameters())
    for seed in range(3):
        train_step(trained, whole, seed)
    initialise_state(resumed)
    made, stored = resumed.state_dict(), copy.deepcopy(whole.state_dict())
    assert [set(s) for s in made["state"].values()] == [set(s) for s in stored["state"].values()]
    fresh.load_state_dict(trained.state_dict())
    resumed.load_state_dict(stored)
    for seed in range(3, 5):
        train_step(trained, whole, seed)
        train_step(fresh, resumed, seed)
    assert bits(fresh.state_dict()) == bits(trained.state_dict())


def test_a_fresh_adam_trains_as_if_its_state_had_not_been_made() -> None:
    models = [model_of(), model_of()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    initialise_state(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        train_step(model, optimizer, 0)
    assert bits(models[0].state_dict()) == bits(models[1].state_dict())


def test_state_that_is_there_stays_and_what_has_none_gets_one() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model[1].weight.grad = torch.ones(2, 3)
    optimizer.step()
    first = bits(optimizer.state[model[1].weight])
    model[0].bias.requires_grad_(False)
    initialise_state(optimizer)
    assert bits(optimizer.state[model[1].weight]) == first
    assert model[0].weight in optimizer.state
    assert model[0].bias not in optimizer.state


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    before = bits(embedding.weight)
    initialise_state(optimizer)
    assert bits(embedding.weight) == before
    assert optimizer.state[embedding.weight]["exp_avg"].shape == (5, 2)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("needs a closure")


def test_an_optimizer_without_such_a_step_is_an_error_and_nothing_changes() -> None:
    model = model_of()
    before = bits(model.state_dict())
    with pytest.raises(OptimizerError, match="LBFGS creates its state in a step with a closure"):
        initialise_state(torch.optim.LBFGS(model.parameters()))
    optimizer = Fails(model.parameters(), lr=0.5)
    with pytest.raises(OptimizerError, match=r"Fails cannot take a step .* RuntimeError: needs a closure"):
        initialise_state(optimizer)
    assert bits(model.state_dict()) == before
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not any(param.grad is not None for param in model.parameters())


def moments(rank: int = 0) -> dict[str, Any]:
    return {
        "optimizer": {
            "state": {
                0: ShardedTensor.from_rank_offsets("optimizer.state.0.exp_avg", torch.ones(4)),
                1: ShardedObject("optimizer.state.1", "more", (1,), (0,)),
            },
            "lr": 0.1,
        },
        "model": ShardedTensor.from_rank_offsets("model.w", torch.ones(2)),
    }


NOTHING: dict[str, Any] = {"optimizer": {"state": {}, "lr": 0.0}}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_an_empty_container_over_stored_arrays_is_an_error(tmp_path: Path, strict: Any) -> None:
    save(moments(), tmp_path / "c")
    with pytest.raises(MissingKeyError) as caught:
        load(NOTHING, tmp_path / "c", strict=strict)
    text = str(caught.value)
    assert "'optimizer.state': 2 keys, 'optimizer.state.0.exp_avg' for one" in text
    assert "megackpt.training.optim.initialise_state(optimizer)" in text
    assert "KeyRule(keys='optimizer.state.*', missing=Policy.IGNORE)" in text


@pytest.mark.parametrize("strict", ["log_unexpected", "log_all"])
def test_modes_that_log_log_it(tmp_path: Path, strict: Any, caplog: pytest.LogCaptureFixture) -> None:
    save(moments(), tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        load(NOTHING, tmp_path / "c", strict=strict)
    assert "'optimizer.state': 2 keys" in caplog.text


@pytest.mark.parametrize(
    ("options", "strict"),
    [
        (LoadOptions(), "ignore_all"),
        (LoadOptions(), "return_unexpected"),
        (LoadOptions(rules=(KeyRule(keys="optimizer.state.*", missing=Policy.IGNORE),)), "raise_unexpected"),
        (LoadOptions(exclude=("optimizer.*",)), "assume_ok_unexpected"),
    ],
)
def test_what_is_listed_as_left_out_is(tmp_path: Path, options: LoadOptions, strict: Any) -> None:
    save(moments(), tmp_path / "c")
    load(NOTHING, tmp_path / "c", strict=strict, options=options)
    load({}, tmp_path / "c")
    load({"optimizer": {"lr": 0.0}, "other": {}, "mod": []}, tmp_path / "c")


def test_what_another_rank_asks_for_is_not_lost(tmp_path: Path) -> None:
    save(moments(), tmp_path / "c")

    def stages(group: Group) -> None:
        load(moments() if group.rank == 1 else NOTHING, tmp_path / "c", group=group)

    def part(group: Group) -> None:
        asked = moments()
        del asked["optimizer"]["state"][0]
        load(asked if group.rank == 1 else NOTHING, tmp_path / "c", group=group)

    SimulatedWorld(3).run(stages)
    for outcome in SimulatedWorld(3).outcomes(part):
        assert isinstance(outcome, MissingKeyError)
        assert "'optimizer.state': 1 keys, 'optimizer.state.0.exp_avg' for one" in str(outcome)


def test_dcp_with_our_planner_raises_the_error_too(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, 0)

    def load_into(fresh: torch.optim.Optimizer, *, allow_partial_load: bool = False) -> dict[str, Any]:
        state = {"optimizer": fresh.state_dict()}
        planner = MegackptLoadPlanner(allow_partial_load=allow_partial_load)
        dcp.load(state, storage_reader=MegackptStorageReader(tmp_path), planner=planner)
        return state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that there is one process only
        dcp.save(
            {"optimizer": optimizer.state_dict()},
            storage_writer=MegackptStorageWriter(tmp_path),
            planner=MegackptSavePlanner(),
        )
        fresh = torch.optim.SGD(model_of().parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(dcp.api.CheckpointException, match=r"4 keys below 'optimizer\.state'.*initialise"):
            load_into(fresh)
        assert load_into(fresh, allow_partial_load=True)["optimizer"]["state"] == {}
        initialise_state(fresh)
        fresh.load_state_dict(load_into(fresh)["optimizer"])
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
