"""Runs of the examples that end and go on: at the same layout bit for bit, at others, by a schedule.

Dropout is on: the masks after the resume have to be those that would have been drawn.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrain_t5
import pytest
from training.arguments import Arguments
from training.schedule import CosineSchedule

from megackpt import Checkpointer, load_common_state_dict, load_plain_tensors
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelLayout
from tests.support.effort import sampled
from tests.support.huggingface_folders import assert_same_tensors
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server, options_for
from tests.support.writers import saver_of
from tests.system.examples.training_runs import (
    LAYOUTS,
    MOE,
    arguments_for,
    deterministic,
    events_of,
    make_trainer,
    metrics_of,
    run_trainer,
    train,
    write_text,
)

STEPS = 6
RUNS = {
    "1 rank": ("1 rank", []),
    "TP2xPP2": ("TP2xPP2", []),
    "TP2xDP2, sequence parallel": ("TP2xDP2", ["--sequence-parallel"]),
    "experts, TP2xPP2xEP2xETP1": ("TP2xPP2xEP2xETP1", [*MOE, "--sequence-parallel"]),
    "experts, CP2xPP2xVPP2xEP2": ("CP2xPP2xVPP2xEP2", [*MOE]),
}


@sampled(6)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, run: str, precision: str
) -> None:
    layout, flags = RUNS[run]
    flags = [*flags, f"--data={write_text(tmp_path / 'text')}", f"--steps={STEPS}", "--dropout=0.1"]
    flags += ["--bf16"] if precision == "bf16" else []

    train(rank_pool, layout, tmp_path / "whole", *flags)
    for until in (2, 5, STEPS):
        train(rank_pool, layout, tmp_path / "parts", *flags, f"--exit-after={until}")

    whole, parts = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert list(parts) == list(whole) == list(range(1, STEPS + 1))
    assert parts == whole  # loss, gradient norm, learning rate and samples of every step, with ==
    last = [load_plain_tensors(tmp_path / name / f"iter_{STEPS:07d}") for name in ("parts", "whole")]
    assert_same_tensors(*last)


PHASES = (  # two steps each
    ("TP2xPP2", "distributed"),
    ("DP4", "distributed"),
    ("TP4", "plain"),
    ("DP4", "plain"),
    ("PP4", "distributed"),
    ("PP2xDP2", "plain"),
    ("TP2xPP2xVPP2", "distributed"),
    ("1 rank", "distributed"),
    ("TP2xDP2", "distributed"),
)
MOE_PHASES = (
    ("TP2xPP2xEP2xETP1", "distributed"),
    ("EP4", "plain"),
    ("TP2xPP2xVPP2", "distributed"),
    ("CP2xDP2xEP2", "distributed"),
    ("1 rank", "plain"),
)
ALLOWED = 1e-5
"""Relative. In float32 without dropout layouts differ by the order of sums only, each rounded at 6e-8; 1e-7
was seen after 16 steps, and a machine that sums otherwise may have a few times that. What resuming can get
wrong is far larger, measured in this test: a lost moment or step count 2e-2 at once, samples shifted by one
7e-4.
"""


@sampled(2)
@pytest.mark.parametrize(
    ("phases", "model"), [(PHASES, ()), (MOE_PHASES, MOE)], ids=["dense", "mixture of experts"]
)
def test_changes_of_layout_and_optimizer_leave_the_losses_as_they_are(
    phases: Sequence[tuple[str, str]], model: Sequence[str], rank_pool: RankPool, tmp_path: Path
) -> None:
    steps = 2 * len(phases)
    flags = [f"--data={write_text(tmp_path / 'text')}", f"--steps={steps}", *model]
    train(rank_pool, phases[0][0], tmp_path / "whole", *flags)
    for phase, (layout, optimizer) in enumerate(phases):
        until = f"--exit-after={2 * phase + 2}"
        train(rank_pool, layout, tmp_path / "elastic", *flags, until, f"--optimizer={optimizer}")

    whole, elastic = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "elastic")
    assert list(elastic) == list(whole) == list(range(1, steps + 1))
    for quantity in ("loss", "grad_norm"):
        off = {step: abs(elastic[step][quantity] / whole[step][quantity] - 1) for step in whole}
        print(f"{quantity}: at most {max(off.values()):.1e} off")
        assert max(off.values()) <= ALLOWED, off
    for quantity in ("lr", "samples"):
        assert [m[quantity] for m in elastic.values()] == [m[quantity] for m in whole.values()]


STORED = CosineSchedule(peak=3e-3, minimum=3e-4, warmup=3, steps=8)
OTHER = CosineSchedule(peak=1e-3, minimum=2e-4, warmup=2, steps=10)


def flags_of(schedule: CosineSchedule) -> list[str]:
    numbers = {"lr": schedule.peak, "min-lr": schedule.minimum, "warmup-steps": schedule.warmup}
    return [f"--steps={schedule.steps}", *(f"--{name}={value}" for name, value in numbers.items())]


# Which: the given schedule, flags, the one that is followed, what the note says, and the weight decay then.
SCHEDULES: dict[str, tuple[CosineSchedule, str, CosineSchedule, list[str], float]] = {
    "the same": (STORED, "--weight-decay=0.3", STORED, [], 0.3),
    "of the checkpoint": (
        OTHER,
        "--use-checkpoint-opt_param-scheduler",
        STORED,
        [
            "the checkpoint's schedule is followed (peak: 0.003 stored, 0.001 given; ",
            "steps: 8 stored, 10 given; weight_decay: 0.3 stored, 0.1 given)",
        ],
        0.3,
    ),
    "of the flags": (OTHER, "--override-opt_param-scheduler", OTHER, ["the given schedule is followed"], 0.1),
}


@pytest.mark.parametrize("which", SCHEDULES)
def test_the_schedule_goes_on_where_it_was_or_as_asked_for_and_reported(
    rank_pool: RankPool, tmp_path: Path, which: str
) -> None:
    asked_for, flag, followed, texts, decay = SCHEDULES[which]
    run, data = tmp_path / "run", f"--data={write_text(tmp_path / 'text')}"
    train(rank_pool, "PP2xDP2", run, data, *flags_of(STORED), "--exit-after=4", "--weight-decay=0.3")
    train(rank_pool, "1 rank", run, data, *flags_of(asked_for), flag)
    expected = [STORED.at(step) for step in range(1, 5)]
    expected += [followed.at(step) for step in range(5, asked_for.steps + 1)]
    assert [measured["lr"] for measured in metrics_of(run).values()] == expected
    starts = events_of(run, "start")
    assert [start["step"] for start in starts] == [0, 4]
    assert [saved["step"] for saved in events_of(run, "save")] == [4, asked_for.steps]
    assert ("schedule is followed" in starts[1]["note"]) == bool(texts)
    assert all(text in starts[1]["note"] for text in texts)
    common = load_common_state_dict(run / f"iter_{asked_for.steps:07d}")
    assert common["optimizer"]["param_groups"]["matrices"]["weight_decay"] == decay


def test_warm_up_then_half_a_cosine_to_the_minimum() -> None:
    assert [STORED.at(step) for step in (1, 2, 3)] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert STORED.at(8) == STORED.at(100) == pytest.approx(3e-4)
    falling = [STORED.at(step) for step in range(3, 9)]
    assert falling == sorted(falling, reverse=True)
    assert CosineSchedule(peak=1.0, minimum=0.0, warmup=0, steps=2).at(1) == pytest.approx(0.5)


@sampled(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"pp": 2}), (2, {"pp": 2, "encoder_stages": 1}), (4, {"cp": 2})],
    ids=["pp2", "pp2-split", "cp2-dp2"],
)
def test_one_rank_continues_what_several_have_begun(
    ranks: int, layout: dict[str, int], rank_pool: RankPool, tmp_path: Path
) -> None:
    def flags(directory: str, steps: int, **layout: int) -> argparse.Namespace:
        chosen = {"tp": 1, "pp": 1, "cp": 1, "encoder_stages": None, **layout}
        return argparse.Namespace(**chosen, steps=steps, ckpt=tmp_path / directory)

    begun = rank_pool.run(pretrain_t5.run, ranks, flags("changed", 2, **layout))[0]
    continued = rank_pool.run(pretrain_t5.run, 1, flags("changed", 2))[0]
    (expected,) = rank_pool.run(pretrain_t5.run, 1, flags("same", 4))
    assert begun + continued == pytest.approx(expected, rel=1e-4)  # float32, sums in another order
    assert expected[-1] < expected[0]


class _Observed(Checkpointer):
    """Notes how much memory there is for copies of the state when a save begins."""

    staging_nbytes: list[int]

    def save(self, *args: Any, **kwargs: Any) -> bool:
        self.staging_nbytes.append(saver_of(self).staging_nbytes)
        return super().save(*args, **kwargs)


def _staging_nbytes(flags: list[str]) -> list[int]:
    sizes: list[int] = []
    with deterministic():
        trainer = make_trainer(arguments_for(ParallelLayout(), flags))
        assert trainer.checkpointer is not None
        trainer.checkpointer.__class__ = _Observed
        trainer.checkpointer.staging_nbytes = sizes
        trainer.run()
    return sizes


def test_the_first_save_finds_memory_for_its_copy(rank_pool: RankPool, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    flags = [f"--data={data}", f"--ckpt={tmp_path / 'run'}", "--steps=2", "--save-interval=1", "--async-save"]
    ((first, second),) = rank_pool.run(_staging_nbytes, 1, flags)
    assert first == second > 0


POLICIES = [
    "--save-interval=1",
    "--save-interval-seconds=1000",
    "--keep-last=1",
    "--keep-every=2",
    "--verify-after-save",
    "--on-save-error=warn",
]


def contiguous_bytes(environment: dict[str, str], arguments: Arguments) -> None:
    """Train in a worker rank that has other variables of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run_trainer(arguments)


def test_a_run_resumed_from_an_object_store_is_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, s3_server: S3Server, tmp_path: Path
) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", "--steps=5", "--dropout=0.1"]
    url, options = f"s3://{BUCKET}/{uuid.uuid4().hex}", options_for(s3_server.port)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    asked = [*flags, *POLICIES, f"--ckpt={url}", f"--metrics={tmp_path}/metrics.jsonl"]
    for until in (3, 5):
        arguments = arguments_for(LAYOUTS["1 rank"], [*asked, f"--exit-after={until}"])
        rank_pool.run(contiguous_bytes, 1, environment, arguments)

    train(rank_pool, "1 rank", tmp_path / "whole", *flags)
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")
    assert events_of(tmp_path, "start")[1]["note"].startswith(f"resumed step 3 from {url}/iter_0000003")
    assert Checkpointer(url, objects=options).steps() == (2, 4, 5)
