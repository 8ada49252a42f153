"""A resume with another configuration: an option is state or configured, and one choice decides."""

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
from torch.optim import lr_scheduler

from megackpt import (
    KeyRule,
    LoadOptions,
    MismatchError,
    MissingKeyError,
    Policy,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.contrib.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)
from megackpt.contrib.group_settings import declare_settings, restore_settings
from megackpt.errors import DeclarationError, OptimizerError
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer, initialise_state
from megackpt.training.optim.param_groups import chosen_options
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule
from megackpt.training.state import ScheduleState, TrainingState
from tests.support.optimizers import OPTIMIZERS as OPTIMIZERS_OF_TORCH

GROUPS = ParallelGroups.create(ParallelLayout())


class Net(ShardedModule):
    def __init__(self) -> None:
        super().__init__(GROUPS)
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.zeros(4))


Adam = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def made(adam: Adam, wrapper: type[Any] = DistributedOptimizer) -> tuple[Net, Any]:
    net = Net()
    groups = [{"params": [net.w], "name": "decay"}, {"params": [net.b], "name": "bias", "weight_decay": 0.0}]
    return net, wrapper(groups, adam, GROUPS)


def adam_with(**options: Any) -> Adam:
    return lambda groups: torch.optim.AdamW(groups, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def saved(adam: Adam, wrapper: type[Any] = DistributedOptimizer) -> MemoryStore:
    net, optimizer = made(adam, wrapper)
    declared = net.sharded_state_dict()
    save({"m": declared, "o": optimizer.sharded_state_dict(declared)}, store := MemoryStore())
    return store


def resumed(store: MemoryStore, adam: Adam, wrapper: type[Any] = DistributedOptimizer, **choice: Any) -> Any:
    net, optimizer = made(adam, wrapper)
    declared = net.sharded_state_dict()
    loaded = load({"m": declared, "o": optimizer.sharded_state_dict(declared)}, store)
    optimizer.load_sharded_state_dict(loaded["o"], **choice)
    return optimizer.param_groups


@pytest.mark.parametrize("wrapper", [DistributedOptimizer, MixedPrecisionOptimizer])
@pytest.mark.parametrize(
    ("option", "stored", "other"),
    [
        ("weight_decay", 0.1, 0.5),
        ("betas", (0.9, 0.999), (0.8, 0.9)),
        ("eps", 1e-8, 1e-6),
    ],
)
def test_what_a_user_configures_is_that_of_the_choice(
    wrapper: type[Any], option: str, stored: Any, other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(adam_with(**{option: stored}), wrapper)
    changed = adam_with(**{option: other})
    with pytest.raises(MismatchError, match=rf"group 'decay': {option} .* stored, .* given") as caught:
        resumed(store, changed, wrapper, when_different="error")
    assert str(stored) in str(caught.value)
    assert str(other) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert resumed(store, changed, wrapper)[0][option] == stored
    assert "those of the checkpoint are used" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resumed(store, changed, wrapper, when_different="given")[0][option] == other
    assert "the given values are used" in caplog.text
    assert f"{option} {stored!r} stored, {other!r} given" in caplog.text


@pytest.mark.parametrize("choice", ["error", "checkpoint", "given"])
def test_the_rate_and_steps_are_state(choice: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = saved(adam_with(lr=3e-3))
    assert [group["lr"] for group in resumed(store, adam_with(lr=1e-2), when_different=choice)] == [
        3e-3,
        3e-3,
    ]
    assert not caplog.records


SCHEDULED = {"0": {"weight_decay": 0.07, "wd_mult": 1.0}, "1": {"betas": (0.95, 0.99), "max_momentum": 0.95}}
EQUAL = {"betas": (0.9, 0.99), "eps": torch.tensor(1e-8, dtype=torch.float64), "weight_decay": 0, "step": 0}


@pytest.mark.parametrize(
    ("stored", "present", "choices"),
    [
        (
            {"0": {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0, "step": 7}},
            {"0": EQUAL},
            ("error",),
        ),
        (
            SCHEDULED,
            {"0": {**SCHEDULED["0"], "weight_decay": 0.1}, "1": {**SCHEDULED["1"], "betas": (0.85, 0.99)}},
            ("error", "given"),
        ),
    ],
    ids=["equal in another form", "set by a schedule at each step"],
)
def test_what_is_state_or_equal_is_no_difference(stored: Any, present: Any, choices: tuple[Any, ...]) -> None:
    for choice in choices:
        assert chosen_options(stored, present, choice) == stored


def test_hosts_optimizers_have_the_same_choice() -> None:
    net = Net()
    optimizer = torch.optim.AdamW([{"params": [net.w, net.b], "name": "all"}], weight_decay=0.1)
    stored = declare_settings(optimizer.param_groups, [net.w, net.b], net.sharded_state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(MismatchError, match=r"weight_decay 0\.1 stored, 0.5 given"):
        restore_settings(optimizer.param_groups, stored, when_different="error")
    restore_settings(optimizer.param_groups, stored, when_different="given")
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    restore_settings(optimizer.param_groups, stored)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_choice_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(DeclarationError, match="when_different='stored' is not known"):
        chosen_options({}, {}, "stored")  # type: ignore[arg-type]


def one_cycle(peak: float) -> tuple[Net, Any, Any]:
    net, optimizer = made(adam_with(lr=peak))
    return net, optimizer, lr_scheduler.OneCycleLR(optimizer.inner, max_lr=peak, total_steps=100)


def with_warmup(peak: float) -> tuple[Net, Any, Any]:
    net, optimizer = made(adam_with(lr=peak))
    return net, optimizer, lr_scheduler.LambdaLR(optimizer.inner, lambda step: min(1.0, (step + 1) / 50))


@pytest.mark.parametrize("build", [one_cycle, with_warmup])
@pytest.mark.parametrize("choice", ["error", "checkpoint", "given"])
@pytest.mark.parametrize("optimizers_choice", ["checkpoint", "given"])
def test_a_run_follows_the_peak_of_the_choice(build: Any, choice: Any, optimizers_choice: Any) -> None:
    """The schedule decides, whatever the load of the optimizer did to its groups."""

    def rates(optimizer: Any, schedule: Any, steps: int) -> list[float]:
        of_steps = []
        for _ in range(steps):
            optimizer.inner.step()
            schedule.step()
            of_steps.append(optimizer.param_groups[0]["lr"])
        return of_steps

    net, optimizer, schedule = build(1e-3)
    rates(optimizer, schedule, 20)
    declared = net.sharded_state_dict()
    part = TrainingState({"schedule": ScheduleState(schedule)})
    store = MemoryStore()
    save({"m": declared, "o": optimizer.sharded_state_dict(declared), **part.sharded_state_dict()}, store)
    uninterrupted = rates(optimizer, schedule, 5)

    _, optimizer, schedule = build(3e-3)
    rates(optimizer, schedule, 20)
    with_new_peak = rates(optimizer, schedule, 5)

    net, optimizer, schedule = build(3e-3)
    part = TrainingState({"schedule": ScheduleState(schedule, when_different=choice)})
    declared = net.sharded_state_dict()
    request = {"m": declared, "o": optimizer.sharded_state_dict(declared), **part.sharded_state_dict()}
    loaded = load(request, store)
    optimizer.load_sharded_state_dict(loaded["o"], when_different=optimizers_choice)
    if choice == "error":
        with pytest.raises(MismatchError, match=r"0\.001.* stored, .*0\.003.* given"):
            part.resume(loaded, step=20)
        return
    (note,) = part.resume(loaded, step=20)
    assert "0.001" in note
    assert "0.003" in note
    if choice == "given":
        assert rates(optimizer, schedule, 5) == pytest.approx(with_new_peak, rel=1e-12)
    else:
        assert rates(optimizer, schedule, 5) == pytest.approx(uninterrupted, rel=1e-12)


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


def moments() -> dict[str, Any]:
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
