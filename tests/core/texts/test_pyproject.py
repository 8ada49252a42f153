"""pyproject.toml: requirements without upper bounds, pins for every Python, our own warnings as errors."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LINES = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
ALL = {line: Requirement(line) for line in LINES}
PYTHONS = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r"Python :: \d\.\d", line)]
# These come with torch, or need CUDA, or are one more name of megackpt.
UNPINNED = {"megackpt", "triton", "nixl-cu12"}
CONSTRAINTS = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in CONSTRAINTS if not line.startswith("#")]


def holds(requirement: Requirement, python: str) -> bool:
    """Return whether a requirement counts on Linux with that Python."""
    surroundings = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    return requirement.marker is None or requirement.marker.evaluate(surroundings)


TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "docs", "examples", "megackpt", "mkdocs.yml",
    "models", "pyproject.toml", "tests",
}  # fmt: skip


def test_the_top_level_has_nothing_that_a_run_has_left() -> None:
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a checkout of git")
    assert {name.partition("/")[0] for name in git.stdout.splitlines()} == TOP_LEVEL


@pytest.mark.parametrize("requirement", ALL.values(), ids=str)
def test_no_requirement_has_an_upper_bound(requirement: Requirement) -> None:
    assert {bound.operator for bound in requirement.specifier} <= {">="}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_once_for_each_python(python: str) -> None:
    pins = [pin for pin in PINS if holds(pin, python)]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins)
    for requirement in ALL.values():
        if requirement.name not in UNPINNED and holds(requirement, python):
            version = versions[requirement.name]
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


@pytest.mark.parametrize(
    "module", ["megackpt.run", "models.gpt", "tests.support.states", "examples.quickstart"]
)
def test_a_warning_of_ours_is_an_error(module: str) -> None:
    with pytest.raises(FutureWarning):
        warnings.warn_explicit("soon", FutureWarning, "file.py", 1, module=module)


@pytest.mark.parametrize("module", ["transformers.models", "torch.distributed", "numpy"])
def test_a_warning_of_another_package_is_none_of_our_failures(module: str) -> None:
    with warnings.catch_warnings(record=True) as seen:  # with the filters of pyproject.toml
        warnings.warn_explicit("soon", FutureWarning, "file.py", 1, module=module)
    assert [str(w.message) for w in seen] == ["soon"]


def test_a_lost_file_is_an_error_wherever_it_is_found() -> None:
    with pytest.raises(ResourceWarning):
        warnings.warn_explicit("unclosed", ResourceWarning, "file.py", 1, module="gc")
