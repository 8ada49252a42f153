"""The scripts of examples/hosts: each is killed and resumed, also at another number of processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

import megackpt
from tests.e2e.command_line import TIMEOUT_S, quiet
from tests.effort import only_thorough

pytestmark = only_thorough("hosts are trained under the command of .ci/run")

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "examples" / "hosts"
STEPS = 100  # enough for a kill between the first checkpoint and the end
FIRST_SAVE = 5


def accelerate(ranks: int) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", f"--num_processes={ranks}"]
    return [*launch, "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


LAUNCHERS = {"accelerate_loop": accelerate, "lightning_fit": torchrun, "trainer": torchrun}
STEP_DIRECTORIES = {
    "accelerate_loop": "iter_{:07d}",
    "lightning_fit": "step={}.ckpt",
    "trainer": "checkpoint-{}/megackpt",
}
PACKAGES = {"accelerate_loop": "accelerate", "lightning_fit": "lightning", "trainer": "transformers"}


def command(host: str, ranks: int, root: Path) -> Sequence[str]:
    return [*LAUNCHERS[host](ranks), str(HOSTS / f"{host}.py"), str(root), str(STEPS)]


def train(host: str, ranks: int, root: Path) -> int:
    """Train to the end; return the step after which the run began."""
    return run_to_its_end(command(host, ranks, root))


def run_to_its_end(words: Sequence[str]) -> int:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        words,
        env=quiet({"PYTHONPATH": path}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (begin,) = set(re.findall(r"begins after step (\d+)", run.stdout))
    return int(begin)


def train_and_kill(host: str, ranks: int, root: Path) -> None:
    """Kill every process of a run while it saves for the second time, or right after."""
    second = root / STEP_DIRECTORIES[host].format(2 * FIRST_SAVE)
    with subprocess.Popen(
        command(host, ranks, root),
        env=quiet({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not second.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        # torchrun puts its workers into sessions of their own, which a signal to its group does not reach.
        for running in [*psutil.Process(process.pid).children(recursive=True), process]:
            running.kill()
    assert not last_step(host, root).exists()


def last_step(host: str, root: Path) -> Path:
    return root / STEP_DIRECTORIES[host].format(STEPS)


def tensors(host: str, root: Path) -> dict[str, Tensor]:
    """Return all arrays of the last checkpoint, by key. Random streams are objects, not arrays."""
    return megackpt.load_plain_tensors(last_step(host, root))


@pytest.mark.parametrize("host", sorted(LAUNCHERS))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(host: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[host])
    whole, killed, elsewhere = (tmp_path / name for name in ("whole", "killed", "elsewhere"))
    assert train(host, 2, whole) == 0
    train_and_kill(host, 2, killed)
    shutil.copytree(killed, elsewhere)
    assert train(host, 2, killed) >= FIRST_SAVE
    assert train(host, 1, elsewhere) >= FIRST_SAVE

    expected = tensors(host, whole)
    assert len(expected) > 10
    same, other = tensors(host, killed), tensors(host, elsewhere)
    assert expected.keys() == same.keys()
    assert all(torch.equal(same[key], tensor) for key, tensor in expected.items())
    # One process adds the gradients of a batch in another order than two; the error grows over 95 steps.
    torch.testing.assert_close(other, expected, rtol=1e-2, atol=1e-3)


def test_checkpoints_of_one_lightning_strategy_load_into_the_other(tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def ddp(name: str) -> list[str]:
        return [*torchrun(2), str(HOSTS / "lightning_fit.py"), str(tmp_path / name), "10"]

    def fsdp(name: str) -> list[str]:
        return [*torchrun(2), str(ROOT / "tests" / "e2e" / "lightning_fsdp.py"), str(tmp_path / name), "10"]

    assert run_to_its_end(ddp("ddp")) == run_to_its_end(fsdp("fsdp")) == 0
    assert run_to_its_end([*fsdp("ddp_then_fsdp"), str(tmp_path / "ddp" / "step=5.ckpt")]) == 5
    shutil.copytree(tmp_path / "fsdp" / "step=5.ckpt", tmp_path / "fsdp_then_ddp" / "step=5.ckpt")
    assert run_to_its_end(ddp("fsdp_then_ddp")) == 5

    expected = megackpt.load_plain_tensors(tmp_path / "ddp" / "step=10.ckpt")
    for name in ("fsdp", "ddp_then_fsdp", "fsdp_then_ddp"):
        last = megackpt.load_plain_tensors(tmp_path / name / "step=10.ckpt")
        # FSDP2 may reduce gradients in another order.
        torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
