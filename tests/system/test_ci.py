"""What `.ci/run` sees is what a newcomer sees: no variable of its own reaches the README's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
LOOP = 'for part in "${parts[@]}"; do\n    printf'


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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


def test_a_part_runs_by_its_name(script: Path) -> None:
    done = run(script, "quick")
    assert (done.returncode, "quick ran" in done.stdout) == (0, True)


def test_only_the_newest_versions_may_fail(script: Path) -> None:
    for part in ("quick", "newest"):
        (script.parent / part).write_text("#!/bin/sh\nexit 1\n")
        (script.parent / part).chmod(0o755)
    assert [run(script, part).returncode for part in ("quick", "newest")] == [1, 0]


def test_an_unknown_part_is_an_error_that_names_them_all(script: Path) -> None:
    done = run(script, "quik")
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
    done = run(script, "quick")
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
