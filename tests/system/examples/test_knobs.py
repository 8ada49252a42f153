"""pretrain_gpt.py as a user starts it: killed in a save, asked by signals, and with every knob as a flag."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from training.arguments import parse_arguments

from megackpt import Checkpointer, DeclarationError
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.storage import LocalStore
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled, with_all
from tests.support.writers import wait_for
from tests.system.examples.command_line import PRETRAIN_GPT, quiet, run_torchrun, start_torchrun
from tests.system.examples.training_runs import SMALL_MODEL, metrics_of, train, write_text

# Two steps each: the flags of a phase save its last step, and load what the phase before has saved.
PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "TP2xDP2",
        (
            "--dist-ckpt-format=torch_dist",
            "--dist-ckpt-torch-dist-multiproc=3",
            "--async-save",
            "--async-when-busy=skip",  # but never the last step, which the next phase loads
            "--save-interval=1",
        ),
    ),
    ("DP4", ("--dist-ckpt-parallel-load", "--no-dist-ckpt-parallel-dist-opt")),
    (
        "TP2xDP2",
        ("--dist-ckpt-parallel-load", "--dist-ckpt-exchange-algo=broadcast", "--dist-ckpt-format=zarr"),
    ),
    ("PP2xDP2", ("--dist-ckpt-parallel-save-within-dp", "--no-dist-ckpt-load-on-device", "--keep-last=2")),
    (
        "DP4",
        (
            "--no-dist-ckpt-parallel-save",
            "--dist-ckpt-assume-constant-structure",
            "--save-interval=1",
            "--dist-ckpt-load-strictness=raise_all",
        ),
    ),
)
STEPS = 2 * len(PHASES)
ALLOWED = 1e-5  # relative; see test_resumes.py


@with_all("the other test compares what knobs write")
def test_a_run_that_changes_its_knobs_learns_what_one_without_does(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", f"--steps={STEPS}"]
    train(rank_pool, "TP2xPP2", tmp_path / "whole", *flags)
    root = tmp_path / "knobs"
    for phase, (layout, knobs) in enumerate(PHASES):
        train(rank_pool, layout, root, *flags, f"--exit-after={2 * phase + 2}", *knobs)

    whole, changed = metrics_of(tmp_path / "whole"), metrics_of(root)
    assert list(changed) == list(range(1, STEPS + 1))
    off = {step: abs(changed[step]["loss"] / whole[step]["loss"] - 1) for step in whole}
    assert max(off.values()) <= ALLOWED, off
    # keep_last=2 in the fourth phase removed the first two steps; every step is saved in the last.
    assert Checkpointer(root).steps() == (6, 8, 9, 10)


@sampled(4)
@pytest.mark.parametrize("knobs", [(), ("--async-save",)])
def test_formats_and_files_are_those_asked_for(
    rank_pool: RankPool, tmp_path: Path, knobs: tuple[str, ...]
) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", "--steps=1", *knobs]
    for name, asked in {
        "megackpt": [],
        "zarr:3": ["--dist-ckpt-format=zarr:3"],
        "torch_dist": ["--dist-ckpt-format=torch_dist", "--dist-ckpt-torch-dist-multiproc=3"],
        "zarr": ["--dist-ckpt-format=zarr"],
    }.items():
        train(rank_pool, "DP4", tmp_path / name, *flags, *asked)
        directory = Checkpointer(tmp_path / name).directory(1)
        assert json.loads((directory / "metadata.json").read_text())["sharded_backend"] == name.split(":")[0]
        if name == "torch_dist":
            assert len(list(directory.glob("__*.distcp"))) == 4 * 3


def test_gathered_optimizer_state_has_fewer_chunks(rank_pool: RankPool, tmp_path: Path) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", "--steps=1"]
    train(rank_pool, "DP4", tmp_path / "sharded", *flags)
    train(rank_pool, "DP4", tmp_path / "gathered", *flags, "--no-dist-ckpt-parallel-dist-opt")
    counts = {}
    for name in ("sharded", "gathered"):
        contents = open_checkpoint(LocalStore(Checkpointer(tmp_path / name).directory(1)))
        counts[name] = len(contents.chunks([k for k in contents.arrays if "exp_avg" in k]).table)
    assert counts["gathered"] < counts["sharded"]


def test_every_knob_is_a_flag_with_the_same_default() -> None:
    assert parse_arguments([*SMALL_MODEL], world_size=1).knobs == CheckpointConfig(save_interval=50)
    assert {f.name for f in fields(CheckpointConfig)} <= set(vars_of_help())


def test_no_strictness_is_the_default_mode() -> None:
    assert CheckpointConfig(dist_ckpt_load_strictness=None) == CheckpointConfig()


def vars_of_help() -> list[str]:
    printed = subprocess.run(
        [sys.executable, str(PRETRAIN_GPT), "--help"], capture_output=True, text=True, check=True
    ).stdout
    return [
        word.strip(",").removeprefix("--").replace("-", "_") for word in printed.split() if word[:2] == "--"
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dist_ckpt_load_strictness": "strict"}, "strict"),
        ({"dist_ckpt_parallel_save": False, "dist_ckpt_parallel_save_within_dp": True}, "within_dp"),
        ({"dist_ckpt_torch_dist_multiproc": 0}, "multiproc is 0"),
        ({"dist_ckpt_exchange_algo": "pigeon"}, "pigeon"),
        ({"dist_ckpt_exchange_algo": "direct"}, "direct"),
        ({"dist_ckpt_format": "tar"}, "'tar'"),
        ({"dist_ckpt_format": "zarr:2"}, "zarr"),
        ({"keep_last": 0}, "keep_last is 0"),
        ({"save_interval": 0}, "save_interval is 0"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"save_interval_seconds": 0.0}, r"save_interval_seconds is 0\.0"),
        ({"exit_signal": "SIGNONSENSE"}, "SIGNONSENSE"),
        ({"exit_signal": "SIGUSR1"}, "save_signal"),
        ({"save_signal": "SIGTERM"}, "exit_signal"),
        ({"on_save_error": "ignore"}, "on_save_error='ignore'"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_knobs_that_make_no_sense_raise_an_error(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((DeclarationError, ValueError), match=message):
        CheckpointConfig(**wrong)  # type: ignore[arg-type]


HANGS_S = 180.0


def test_a_signal_saves_and_another_ends_the_run_as_well_with_a_code_of_its_own(tmp_path: Path) -> None:
    flags = [*SMALL_MODEL, f"--data={write_text(tmp_path / 'text')}", f"--ckpt={tmp_path / 'run'}"]
    flags += ["--steps=100000", "--exit-signal=SIGTERM", "--save-signal=SIGUSR1"]
    command = [sys.executable, str(PRETRAIN_GPT), *flags]
    run = subprocess.Popen(command, env=quiet({}), stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), HANGS_S)
        run.send_signal(signal.SIGUSR1)
        wait_for(lambda: Checkpointer(tmp_path / "run").latest() is not None, HANGS_S)
        saved = Checkpointer(tmp_path / "run").latest()
        run.send_signal(signal.SIGTERM)
        assert run.wait(HANGS_S) == 128 + signal.SIGTERM
    finally:
        run.kill()
    latest = Checkpointer(tmp_path / "run").latest()
    assert saved is not None
    assert latest is not None
    assert saved < latest == max(metrics_of(tmp_path / "run"))


RANKS = 2


def kill_in_the_save_of(step_directory: str, watched: Path, flags: list[str]) -> None:
    """Run until all of a step but its commit is written, then kill every rank with SIGKILL."""
    script = Path(__file__).parent / "stop_before_commit.py"
    agent = start_torchrun(RANKS, script, flags, {"WATCHED": str(watched), "STOP_AT": step_directory})
    try:
        wait_for((watched / "stopped").exists, HANGS_S)
        for rank in range(RANKS):
            os.kill(int((watched / f"rank-{rank}").read_text()), signal.SIGKILL)
        assert agent.wait(60) != 0
    finally:
        agent.kill()
        agent.wait()


@with_all("tests/faults kills saves at many moments")
def test_a_run_killed_in_a_save_goes_on_from_the_step_before_at_another_layout(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    flags = [*SMALL_MODEL, f"--data={write_text(tmp_path / 'text')}", f"--ckpt={ckpt}", "--steps=6"]
    (tmp_path / "watched").mkdir()
    kill_in_the_save_of("iter_0000004", tmp_path / "watched", [*flags, "--tp=2", "--save-every=2"])
    assert sorted(entry.name for entry in ckpt.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]
    assert list((ckpt / "iter_0000004").rglob("*.safetensors"))  # incomplete, and not empty

    resumed = run_torchrun(RANKS, [*flags, "--save-every=3", "--keep-last=2"])
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == ""
    warning, what, *saves, losses, last = resumed.stderr.splitlines()
    assert warning == (
        f"{ckpt}/iter_0000004 is not committed (its save did not finish) and is ignored; the newest "
        f"committed step is 2."
    )
    assert what == (
        f"resumed step 2 from {ckpt}/iter_0000002, saved at tp2 pp1 dp1, now at tp1 pp1 dp2; random streams "
        f"are fresh: they were saved at cp 1, dp 1, pp 1, tp 2, and this run is at cp 1, dp 2, pp 1, tp 1"
    )
    assert [re.sub(r"\d+\.\d+", "X", line) for line in saves] == [
        f"step {step}: loss X, checkpoint saved in X s" for step in (3, 6)
    ]
    assert re.fullmatch(r"loss: ([\d.]+ at step \d, ){3}[\d.]+ at step 6; [\d.]+ s a step", losses)
    assert last == f"step 6 is done; checkpoint: {ckpt}/iter_0000006, metrics: {ckpt}/metrics.jsonl"

    # --keep-last 2 and the removal of the incomplete step by the save of step 3
    assert sorted(entry.name for entry in ckpt.iterdir()) == [
        "iter_0000003",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]
    assert (ckpt / "iter_0000003" / "metadata.json").is_file()
    lines = [json.loads(line) for line in (ckpt / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    for first, again in zip(steps[2:4], steps[4:6], strict=True):  # same samples, another order of sums
        assert again["samples"] == first["samples"]
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-5)
    starts = [line for line in lines if line.get("event") == "start"]
    assert [(start["step"], start["layout"]) for start in starts] == [
        (0, {"tp": 2, "pp": 1, "dp": 1}),
        (2, {"tp": 1, "pp": 1, "dp": 2}),
    ]


@with_all("a plain run gives wrong flags to one process")
def test_torchrun_shows_one_line_of_ours_for_bad_flags() -> None:
    rejected = run_torchrun(RANKS, ["--tp=3"])
    assert rejected.returncode != 0
    ours = [line for line in rejected.stderr.splitlines() if line.startswith("pretrain_gpt.py:")]
    assert len(ours) == 1
    assert "2 ranks cannot be divided among model replicas of tp=3 x pp=1" in ours[0]
    assert rejected.stderr.count("exitcode  : 2") >= 1  # torchrun's own report
