"""The scripts of examples/hosts: each is killed and resumed, also at another number of processes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

import megackpt
from tests.support.effort import with_all
from tests.system.examples.command_line import TIMEOUT_S, quiet, torchrun

pytestmark = with_all("hosts are trained under the command of .ci/run")

ROOT, CONTRIB = Path(__file__).parents[2], Path(__file__).parent
SCRIPTS = ROOT / "examples" / "hosts"
FIRST_SAVE = 5


def accelerate(ranks: int) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", f"--num_processes={ranks}"]
    return [*launch, "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


def megatron_on_cpu(ranks: int) -> list[str]:
    return torchrun(ranks, CONTRIB / "megatron" / "megatron_on_cpu.py")


def torchtitan_on_cpu(ranks: int) -> list[str]:
    return torchrun(ranks, CONTRIB / "torchtitan" / "torchtitan_on_cpu.py")


def ray(ranks: int) -> list[str]:
    return [sys.executable]


class Host(NamedTuple):
    """A script: how it is started, where its steps are, and the package that it needs."""

    launch: Callable[[int], list[str]]
    directory: str
    package: str
    steps: int = 100  # enough for a kill between the first checkpoint and the end
    resumed_on: tuple[int, ...] = (2, 1)


HOSTS = {
    "accelerate_loop": Host(accelerate, "iter_{:07d}", "accelerate"),
    "lightning_fit": Host(torchrun, "step={}.ckpt", "lightning"),
    "megatron_bridge": Host(megatron_on_cpu, "iter_{:07d}", "megatron.bridge", 25),
    # 4 is tensor parallelism 2 with data parallelism 2.
    "megatron_core": Host(megatron_on_cpu, "iter_{:07d}", "megatron.core", 25, (2, 1, 4)),
    # It takes as long to start as all of another host's runs.
    "ray_train": Host(ray, "fit/iter_{:07d}", "ray.train", 30, (1,)),
    "torchtitan_train": Host(torchtitan_on_cpu, "checkpoint/iter_{:07d}", "torchtitan", 25),
    "trainer": Host(torchrun, "checkpoint-{}/megackpt", "transformers"),
}


@pytest.fixture(autouse=True)
def ray_files_in_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray has sockets (with short paths) and logs in one folder, and a token in the home directory."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        for name in ("HOME", "RAY_TMPDIR"):
            monkeypatch.setenv(name, folder)
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # it also asks for reports then
        yield


def require(package: str) -> None:
    """Skip the test if a package is absent. Not imported: megatron.bridge as a whole needs CUDA packages."""
    top = package.partition(".")[0]
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def command(host: str, ranks: int, root: Path) -> Sequence[str]:
    script = [str(SCRIPTS / f"{host}.py"), str(root), str(HOSTS[host].steps)]
    return [*HOSTS[host].launch(ranks), *script, *([str(ranks)] if host == "ray_train" else [])]


def environment() -> dict[str, str]:
    return quiet({"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})


def run_to_its_end(words: Sequence[str]) -> int:
    """Train to the end; return the step after which the run began."""
    run = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (begin,) = set(re.findall(r"begins after step (\d+)", run.stdout))
    return int(begin)


def train_and_kill(host: str, ranks: int, root: Path) -> None:
    """Kill every process of a run while it saves a later step than the first, or right after."""
    # Ray asks the workers for one report at a time, so the first step is in its list before the third.
    later = root / HOSTS[host].directory.format((4 if host == "ray_train" else 2) * FIRST_SAVE)
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(host, ranks, root), env=environment(), **silent) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not later.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        # Launchers put their workers into sessions of their own, which a signal to a group does not reach.
        workers = psutil.Process(process.pid).children(recursive=True)
        for running in [*workers, process]:
            running.kill()
        psutil.wait_procs(workers, timeout=TIMEOUT_S)
    assert not last_step(host, root).exists()


def last_step(host: str, root: Path) -> Path:
    return root / HOSTS[host].directory.format(HOSTS[host].steps)


@pytest.mark.parametrize("host", sorted(HOSTS))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(host: str, tmp_path: Path) -> None:
    require(HOSTS[host].package)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    resumed = {ranks: tmp_path / f"on_{ranks}" for ranks in HOSTS[host].resumed_on}
    assert run_to_its_end(command(host, 2, whole)) == 0
    train_and_kill(host, 2, killed)
    for ranks, root in resumed.items():
        shutil.copytree(killed, root)
        assert run_to_its_end(command(host, ranks, root)) >= FIRST_SAVE

    if host == "ray_train":  # nothing is copied, and what num_to_keep=2 does not keep is removed
        steps = {path.name for path in (whole / "fit").glob("[!.]*") if path.is_dir()}
        assert steps == {f"iter_{HOSTS[host].steps - FIRST_SAVE:07d}", last_step(host, whole).name}
    expected = megackpt.load_plain_tensors(last_step(host, whole))
    assert len(expected) > 10
    for ranks, root in resumed.items():
        last = megackpt.load_plain_tensors(last_step(host, root))
        assert last.keys() == expected.keys()
        if ranks == 2:
            assert all(torch.equal(last[key], tensor) for key, tensor in expected.items())
        else:  # gradients are added in another order; the error grows over 95 steps
            torch.testing.assert_close(last, expected, rtol=1e-2, atol=1e-3)


def test_checkpoints_of_one_lightning_strategy_load_into_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")

    def ddp(name: str) -> int:
        return run_to_its_end(torchrun(2, SCRIPTS / "lightning_fit.py", tmp_path / name, 10))

    def fsdp(name: str, *resumed: Path) -> int:
        program = CONTRIB / "lightning" / "lightning_fsdp.py"
        return run_to_its_end(torchrun(2, program, tmp_path / name, 10, *resumed))

    assert ddp("ddp") == fsdp("fsdp") == 0
    assert fsdp("ddp_then_fsdp", tmp_path / "ddp" / "step=5.ckpt") == 5
    shutil.copytree(tmp_path / "fsdp" / "step=5.ckpt", tmp_path / "fsdp_then_ddp" / "step=5.ckpt")
    assert ddp("fsdp_then_ddp") == 5

    monkeypatch.setenv("LIGHTNING_TP", "2")
    assert fsdp("fsdp_then_tp", tmp_path / "fsdp" / "step=5.ckpt") == 5

    expected = megackpt.load_plain_tensors(tmp_path / "ddp" / "step=10.ckpt")
    for name in ("fsdp", "ddp_then_fsdp", "fsdp_then_ddp", "fsdp_then_tp"):
        last = megackpt.load_plain_tensors(tmp_path / name / "step=10.ckpt")
        # FSDP2 and tensor parallelism add in another order.
        torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
