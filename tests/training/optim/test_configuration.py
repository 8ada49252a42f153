"""A resume with another configuration: an option is state or configured, and one choice decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from megackpt import MismatchError, load, save
from megackpt.contrib.group_settings import declare_settings, restore_settings
from megackpt.errors import DeclarationError
from megackpt.storage import MemoryStore
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.param_groups import CONFIGURED_OPTIONS, chosen_options
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule
from megackpt.training.state import ScheduleState, TrainingState

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


def test_equal_configurations_are_no_difference_whatever_their_form() -> None:
    stored = {"0": {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0, "step": 7}}
    present = {
        "0": {
            "betas": (0.9, 0.99),
            "eps": torch.tensor(1e-8, dtype=torch.float64),
            "weight_decay": 0,
            "step": 0,
        }
    }
    assert chosen_options(stored, present, "error") == stored


def test_what_a_schedule_sets_at_each_step_is_state() -> None:
    stored = {"0": {"weight_decay": 0.07, "wd_mult": 1.0}, "1": {"betas": (0.95, 0.99), "max_momentum": 0.95}}
    present = {"0": {"weight_decay": 0.1, "wd_mult": 1.0}, "1": {"betas": (0.85, 0.99), "max_momentum": 0.95}}
    assert chosen_options(stored, present, "error") == stored
    assert chosen_options(stored, present, "given") == stored


@pytest.mark.parametrize("option", sorted(CONFIGURED_OPTIONS))
@pytest.mark.parametrize("choice", ["error", "checkpoint", "given"])
def test_the_table_of_options_and_choices(option: str, choice: Any) -> None:
    stored, present = {"0": {option: 1.0, "other": 5}}, {"0": {option: 2.0, "other": 6}}
    if choice == "error":
        with pytest.raises(MismatchError, match=f"{option} 1.0 stored, 2.0 given"):
            chosen_options(stored, present, choice)
    else:
        expected = 1.0 if choice == "checkpoint" else 2.0
        assert chosen_options(stored, present, choice) == {"0": {option: expected, "other": 5}}


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
