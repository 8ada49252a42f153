"""Step and learning rate go on; where the checkpoint was trained with others, the user says which hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.schedule import CosineSchedule

from megackpt import load_common_state_dict
from megackpt.testing.ranks import RankPool
from tests.system.examples.training_runs import events_of, metrics_of, train, write_text

STORED = CosineSchedule(peak=3e-3, minimum=3e-4, warmup=3, steps=8)
OTHER = CosineSchedule(peak=1e-3, minimum=2e-4, warmup=2, steps=10)


def flags_of(schedule: CosineSchedule) -> list[str]:
    numbers = {"lr": schedule.peak, "min-lr": schedule.minimum, "warmup-steps": schedule.warmup}
    return [f"--steps={schedule.steps}", *(f"--{name}={value}" for name, value in numbers.items())]


def rates(directory: Path) -> list[float]:
    return [measured["lr"] for measured in metrics_of(directory).values()]


def weight_decay_at(directory: Path, step: int) -> float:
    """Return what a step was trained with, as its checkpoint says."""
    common = load_common_state_dict(directory / f"iter_{step:07d}")
    decay: float = common["optimizer"]["param_groups"]["matrices"]["weight_decay"]
    return decay


def trained_to_step_4(pool: RankPool, tmp_path: Path) -> list[str]:
    data = f"--data={write_text(tmp_path / 'text')}"
    train(pool, "PP2xDP2", tmp_path / "run", data, *flags_of(STORED), "--exit-after=4", "--weight-decay=0.3")
    return [data]


def test_the_schedule_goes_on_where_it_was(rank_pool: RankPool, tmp_path: Path) -> None:
    data = trained_to_step_4(rank_pool, tmp_path)
    train(rank_pool, "1 rank", tmp_path / "run", *data, *flags_of(STORED), "--weight-decay=0.3")
    assert rates(tmp_path / "run") == [STORED.at(step) for step in range(1, 9)]
    notes = [start["note"] for start in events_of(tmp_path / "run", "start")]
    assert "schedule is followed" not in notes[1]
    assert [start["step"] for start in events_of(tmp_path / "run", "start")] == [0, 4]
    assert [saved["step"] for saved in events_of(tmp_path / "run", "save")] == [4, 8]


def test_the_schedule_of_the_checkpoint_is_followed_where_asked_for_and_reported(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    data = trained_to_step_4(rank_pool, tmp_path)
    asked = "--use-checkpoint-opt_param-scheduler"
    train(rank_pool, "1 rank", tmp_path / "run", *data, *flags_of(OTHER), asked)
    assert rates(tmp_path / "run") == [STORED.at(step) for step in range(1, 11)]
    note = events_of(tmp_path / "run", "start")[1]["note"]
    assert "the checkpoint's schedule is followed (peak: 0.003 stored, 0.001 given; " in note
    assert "steps: 8 stored, 10 given; weight_decay: 0.3 stored, 0.1 given)" in note
    assert weight_decay_at(tmp_path / "run", 10) == 0.3


def test_override_schedule_follows_the_flags(rank_pool: RankPool, tmp_path: Path) -> None:
    data = trained_to_step_4(rank_pool, tmp_path)
    train(rank_pool, "1 rank", tmp_path / "run", *data, *flags_of(OTHER), "--override-opt_param-scheduler")
    expected = [STORED.at(step) for step in range(1, 5)] + [OTHER.at(step) for step in range(5, 11)]
    assert rates(tmp_path / "run") == expected
    assert "the given schedule is followed" in events_of(tmp_path / "run", "start")[1]["note"]
    assert weight_decay_at(tmp_path / "run", 10) == 0.1


def test_warm_up_then_half_a_cosine_to_the_minimum() -> None:
    assert [STORED.at(step) for step in (1, 2, 3)] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert STORED.at(8) == STORED.at(100) == pytest.approx(3e-4)
    falling = [STORED.at(step) for step in range(3, 9)]
    assert falling == sorted(falling, reverse=True)
    assert CosineSchedule(peak=1.0, minimum=0.0, warmup=0, steps=2).at(1) == pytest.approx(0.5)
