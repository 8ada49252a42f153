"""Commands as processes: interrupted, and on several ranks of torchrun."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from megackpt.testing.identical import difference
from tests.core.face.test_convert import everything_in, saved
from tests.support.effort import with_all
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, random_config, saved_model

MEGACKPT = ["-m", "megackpt.cli"]


@with_all("tests/core/face/test_output.py interrupts commands within its process")
def test_an_interrupt_ends_a_real_command_with_one_line(tmp_path: Path) -> None:
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)  # the command waits for a writer
    command = [sys.executable, *MEGACKPT, "maps", "show", "--config", str(fifo)]
    # What a shell starts in the background ignores Ctrl-C: perhaps these tests, and so what they start.
    as_in_foreground = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_foreground)
    # Once the file is opened by both, the command reads. If it has to wait too long, it ends with the file.
    with started as process, open(fifo, "w"):
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
    assert process.returncode == 130
    assert message.strip().startswith("megackpt: interrupted. ")
    assert len(message.strip().splitlines()) == 1


def on_two_ranks(*arguments: Path | str) -> Any:
    """Return what a command that torchrun starts on two ranks prints, as JSON: once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, *MEGACKPT, *map(str, arguments), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@with_all("tests/core/face/test_convert.py shares the work between simulated ranks")
def test_torchrun_shares_the_chunks_of_a_conversion_between_two_processes(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "source"), tmp_path / "target"
    assert on_two_ranks("convert", source, target, "--to", "megackpt:1")["is_verified"] is True
    assert len(list((target / "data").iterdir())) == 2
    assert difference(everything_in(source), everything_in(target)) is None


@with_all("test_huggingface_export.py shares files among threads")
def test_torchrun_shares_the_files_of_an_export_between_two_processes(tmp_path: Path) -> None:
    source, folder = tmp_path / "saved", tmp_path / "folder"
    expected = saved_model(source, random_config("llama", 0), 5)
    report = on_two_ranks("convert", source, folder, "--to", "huggingface", "--max-file-size", "5kB")
    assert report["is_verified"] is True
    assert_same_tensors(folder_tensors(folder), expected)
