"""A schedule continues where it was; a different configuration is an error, or resolved as asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from megackpt import DeclarationError, MismatchError, load, save
from megackpt.training_state import ScheduleState

GIVEN = {"peak": 1e-3, "minimum": 1e-4, "warmup": 10, "num_steps": 0}
STORED = {"peak": 3e-3, "minimum": 1e-4, "warmup": 20, "num_steps": 50}


def resumed(stored: Any, schedule: Any, path: Path, **options: Any) -> tuple[ScheduleState, str]:
    save({"schedule": ScheduleState(stored).sharded_state_dict()}, path)
    state = ScheduleState(schedule, **options)
    return state, state.resume(load({"schedule": state.sharded_state_dict()}, path)["schedule"], step=50)


def test_a_difference_is_an_error_that_names_each_field_with_both_values(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as raised:
        resumed(STORED, GIVEN, tmp_path / "c")
    assert "  peak: 0.003 stored, 0.001 given\n  warmup: 20 stored, 10 given\n" in str(raised.value)
    assert "num_steps" not in str(raised.value)
    assert "minimum" not in str(raised.value)


def test_the_checkpoint_s_schedule_wins_where_asked_for(tmp_path: Path) -> None:
    state, note = resumed(STORED, GIVEN, tmp_path / "c", when_different="checkpoint")
    assert state.values == STORED
    assert note == (
        "the checkpoint's schedule is followed (peak: 0.003 stored, 0.001 given; warmup: 20 stored, 10 given)"
    )


def test_the_given_schedule_wins_where_asked_for_with_the_progress_that_is_stored(tmp_path: Path) -> None:
    state, note = resumed(STORED, GIVEN, tmp_path / "c", when_different="given")
    assert state.values == {**GIVEN, "num_steps": 50}
    assert note.startswith("the given schedule is followed (peak:")


def test_equal_schedules_continue_without_a_note(tmp_path: Path) -> None:
    state, note = resumed({**GIVEN, "num_steps": 50}, GIVEN, tmp_path / "c")
    assert (state.values["num_steps"], note) == (50, "")


def test_a_field_that_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"decay: nothing stored, 2 given"):
        resumed(STORED, {**STORED, "decay": 2}, tmp_path / "c")


Make = Callable[[SGD], Any]
SCHEDULES: dict[str, Make] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=30),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 6]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, gamma=0.9)],
        milestones=[5],
    ),
}


def rates(optimizer: SGD, schedule: Any, steps: int) -> list[float]:
    results = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        results.append(optimizer.param_groups[0]["lr"])
    return results


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_s_schedules_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    optimizer = SGD([torch.ones(1)], lr=0.5)
    schedule = SCHEDULES[name](optimizer)
    rates(optimizer, schedule, 7)
    state = {"s": ScheduleState(schedule).sharded_state_dict(), "optimizer": optimizer.state_dict()}
    save(state, tmp_path / "c")
    expected = rates(optimizer, schedule, 12)

    fresh = SGD([torch.ones(1)], lr=0.5)
    again = SCHEDULES[name](fresh)
    resumed = ScheduleState(again)
    loaded = load({"s": resumed.sharded_state_dict()}, tmp_path / "c")
    fresh.load_state_dict(loaded["optimizer"])
    assert resumed.resume(loaded["s"], step=7) == ""
    assert rates(fresh, again, 12) == expected


def test_a_field_deep_in_a_chained_schedule_is_named_and_overridden(tmp_path: Path) -> None:
    def chained(gamma: float) -> Any:
        optimizer = SGD([torch.ones(1)], lr=0.5)
        parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma=gamma)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])

    with pytest.raises(MismatchError, match=r"_schedulers\.1\.gamma: 0\.9 stored, 0\.8 given"):
        resumed(chained(0.9), chained(0.8), tmp_path / "c")
    state, _ = resumed(chained(0.9), chained(0.8), tmp_path / "c", when_different="given")
    assert state.values["_schedulers"][1]["gamma"] == 0.8


def test_megatron_s_schedule_goes_on_and_is_compared(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.optimizer_param_scheduler")

    def scheduler(**changes: float) -> Any:
        asked: dict[str, Any] = {
            **{"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 4, "lr_decay_steps": 20},
            **{"lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 20},
            **{"wd_incr_style": "constant"},
        }
        return module.OptimizerParamScheduler(SGD([torch.ones(1)], lr=0.5), **{**asked, **changes})

    trained = scheduler()
    trained.step(increment=7)
    path = tmp_path / "c"
    save({"schedule": ScheduleState(trained).sharded_state_dict()}, path)
    results = {}
    for when, changes in [("error", {}), ("checkpoint", {"max_lr": 1.0}), ("given", {"max_lr": 1.0})]:
        again = scheduler(**changes)
        state = ScheduleState(again, when_different=when)  # type: ignore[arg-type]
        state.resume(load({"schedule": state.sharded_state_dict()}, path)["schedule"], step=7)
        assert again.num_steps == 7
        results[when] = again.optimizer.param_groups[0]["lr"]
    assert results["error"] == results["checkpoint"] == trained.optimizer.param_groups[0]["lr"]
    assert results["given"] > 0.5
    different = ScheduleState(scheduler(max_lr=1.0))
    loaded = load({"schedule": different.sharded_state_dict()}, path)["schedule"]
    with pytest.raises(MismatchError, match=r"max_lr: 0\.001 stored, 1\.0 given"):
        different.resume(loaded, step=7)


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(DeclarationError, match="Give 'error', 'checkpoint' or 'given'"):
        ScheduleState({}, when_different="stored")  # type: ignore[arg-type]
