"""`megackpt init`: each script runs as it is, resumes, and ends at a signal."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megackpt import Checkpointer
from megackpt.cli.init import SCRIPTS
from tests.support.command_line import CommandLine


def torchrun(script: Path, *arguments: object, ranks: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    return subprocess.run(
        [*words, str(script), *map(str, arguments)], capture_output=True, text=True, cwd=script.parent
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_script_trains_and_resumes_at_another_number_of_ranks(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    assert "torchrun --nproc-per-node 2" in CommandLine(capsys).out("init", kind, script)
    for ranks, steps, begins in ((2, 25, 0), (1, 30, 25)):
        done = torchrun(script, "run", steps, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert f"rank 0 begins after step {begins}" in done.stdout
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
        done = torchrun(tmp_path / "train.py", "run", steps, ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint-14" / "megackpt" / "metadata.json").exists()
