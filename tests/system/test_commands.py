"""Commands as processes: interrupted, on several ranks of torchrun, and `.ci/run`.

What `.ci/run` sees is what a newcomer sees: no variable of its own reaches the README's commands.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megackpt.testing.identical import difference
from tests.core.face.test_convert import everything_in, saved
from tests.support.effort import with_all
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, random_config, saved_model
from tests.system.examples.command_line import quiet, torchrun

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
    command = torchrun(2, *MEGACKPT, *arguments, "--json")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=quiet({}))
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


CI = Path(__file__).parents[2] / ".ci"
LOOP = 'for part in "${parts[@]}"; do\n    printf'


def run_ci(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in ("HOME", "PATH")}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a copy of `.ci/run` whose part `quick` only says that it ran."""
    (tmp_path / ".ci").mkdir()
    quick = tmp_path / ".ci" / "quick"
    quick.write_text("#!/bin/sh\necho quick ran\n")
    quick.chmod(0o755)
    return Path(shutil.copy(CI / "run", tmp_path / ".ci" / "run"))


def test_a_part_runs_by_its_name_and_only_the_newest_versions_may_fail(script: Path) -> None:
    done = run_ci(script, "quick")
    assert (done.returncode, "quick ran" in done.stdout) == (0, True)
    for part in ("quick", "newest"):
        (script.parent / part).write_text("#!/bin/sh\nexit 1\n")
        (script.parent / part).chmod(0o755)
    assert [run_ci(script, part).returncode for part in ("quick", "newest")] == [1, 0]


def test_an_unknown_part_is_an_error_that_names_them_all(script: Path) -> None:
    done = run_ci(script, "quik")
    assert done.returncode == 2
    assert "no part 'quik': one of quick, checks, docs, system, hosts" in done.stderr


@pytest.mark.parametrize(
    "line",
    ["export OMP_NUM_THREADS=1", "declare -x TZ=UTC", "set -a; SEED=1", "PATH=/opt/bin:$PATH", "unset HOME"],
)
def test_a_variable_that_is_exported_before_the_commands_is_an_error(script: Path, line: str) -> None:
    text = script.read_text()
    assert LOOP in text
    script.write_text(text.replace(LOOP, f"{line}\n{LOOP}"))
    done = run_ci(script, "quick")
    assert done.returncode == 1
    assert ".ci/run exports a variable before 'quick'" in done.stderr
    assert "quick ran" not in done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a git repository whose README has two commands that write down what they see."""
    folder = tmp_path / "checkout"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(CI / "quick", folder / ".ci" / "quick")
    see = f"pip install -e 2> /dev/null || (env; umask; pwd) >> {tmp_path}/seen"
    (folder / "README.md").write_text(f"```bash\n{see}\n```\n\n```bash\n{see}\n```\n")
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "."]):
        subprocess.run([*git, *command], check=True)
    return folder


def quick(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", ".ci/quick", str(checkout.parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "7", "MASTER_ADDR": "nowhere"}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_the_commands_have_no_variable_but_home_and_path(checkout: Path) -> None:
    assert quick(checkout).returncode == 0
    seen = (checkout.parent / "seen").read_text().splitlines()
    names = {line.partition("=")[0] for line in seen if "=" in line}
    assert names - {"PWD", "SHLVL", "_"} == {"HOME", "PATH"}  # the shell sets the other three itself
    assert seen.count("0077") == 2
    assert seen.count(f"{checkout.parent}/newcomer's files/megackpt") == 2


def test_an_environment_that_is_handed_on_is_an_error(checkout: Path) -> None:
    script = checkout / ".ci" / "quick"
    script.write_text(script.read_text().replace("env -i ", "env "))
    done = quick(checkout)
    assert done.returncode == 1
    assert "would run with other variables than a newcomer's HOME and PATH" in done.stderr
    assert not (checkout.parent / "seen").exists()
