"""pretrain_gpt.py as a user starts it: asked by signals, and with every knob as a flag."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from training.arguments import parse_arguments

from megackpt import Checkpointer, DeclarationError
from megackpt.cli.init import SCRIPTS
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.storage import LocalStore
from megackpt.testing.ranks import RankPool
from tests.support.command_line import CommandLine
from tests.support.effort import sampled
from tests.support.writers import wait_for
from tests.system.examples.command_line import PRETRAIN_GPT, quiet, torchrun
from tests.system.examples.training_runs import SMALL_MODEL, metrics_of, train, write_text


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
    assert CheckpointConfig(dist_ckpt_load_strictness=None) == CheckpointConfig()
    command = [sys.executable, str(PRETRAIN_GPT), "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = {word.strip(",-").replace("-", "_") for word in printed.split() if word.startswith("--")}
    assert {f.name for f in fields(CheckpointConfig)} <= flags


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


def train_on(ranks: int, script: Path, steps: int) -> str:
    """Run a script of `megackpt init` in its folder; return what it prints."""
    words = torchrun(ranks, script, "run", steps)
    done = subprocess.run(words, capture_output=True, text=True, cwd=script.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_script_trains_and_resumes_at_another_number_of_ranks(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    assert "torchrun --nproc-per-node 2" in CommandLine(capsys).out("init", kind, script)
    for ranks, steps, begins in ((2, 25, 0), (1, 30, 25)):
        assert f"rank 0 begins after step {begins}" in train_on(ranks, script, steps)
    assert Checkpointer(tmp_path / "run").steps() == (20, 25, 30)


def test_a_script_saves_at_a_signal_and_ends_with_the_code_that_restarts_a_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPTS["ddp"].replace(
        "        x = torch.randn", "        signal_at(step)\n        x = torch.randn"
    )
    head = "import os\n\n\ndef signal_at(step):\n    if step == 13:\n        os.kill(os.getpid(), 15)\n\n\n"
    script.write_text(text.replace("import signal\n", head + "import signal\n", 1))
    # One process without torchrun, which would report its own code.
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = [sys.executable, "train.py", "run", "50"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **environment}
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert Checkpointer(tmp_path / "run").latest() == 13


def test_the_script_of_the_trainer_trains_and_resumes(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers and accelerate are not installed")
    (tmp_path / "train.py").write_text(SCRIPTS["trainer"])
    for steps, ranks in ((12, 2), (14, 1)):
        train_on(ranks, tmp_path / "train.py", steps)
    assert (tmp_path / "run" / "checkpoint-14" / "megackpt" / "metadata.json").exists()
