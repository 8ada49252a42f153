"""A format in a package of its own: installed, found, conforming; and what is broken does not conform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.effort import with_all

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that pip has installed the package into."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"  # building leaves files in the parent directory
    subprocess.run(["cp", "-r", str(HERE / "package"), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def run_checks(installed: Path, chosen: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run some of the checks in a process that sees the installed package."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, "-k", chosen]
    return subprocess.run(
        [*command, str(HERE / "check_package.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


OTHERS = with_all("the package is installed and used by the other tests")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("NpyFiles or by_a_manifest", marks=OTHERS, id="format"),
        pytest.param("Shelf or urls or not_known or object_stores", marks=OTHERS, id="store"),
        pytest.param("model_type or its_map or our_families or left_out", id="families"),
    ],
)
def test_the_installed_package_passes_what_is_asked_of_it(installed: Path, chosen: str) -> None:
    result = run_checks(installed, chosen)
    assert result.returncode == 0, result.stdout
    assert "failed" not in result.stdout


def test_broken_strategies_fail_it_and_the_report_shows_how(installed: Path) -> None:
    result = run_checks(installed, "(ReadsFrom or SameName) and (any_range or fails_anywhere)", "-rf")
    assert result.returncode == 1
    failed = {
        line.split()[1].split("::", 1)[1] for line in result.stdout.splitlines() if line[:6] == "FAILED"
    }
    assert "TestReadsFromTheStart::test_any_range_of_a_chunk_can_be_read" in failed
    same_name = "test_a_save_that_fails_anywhere_leaves_the_old_checkpoint_or_the_new"
    assert f"TestSameNameEverySave::{same_name}" in failed
