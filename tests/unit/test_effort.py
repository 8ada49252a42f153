"""The mark `one_in(n)`: a plain run tries a share of a test's cases, and says which it leaves out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import SEED

ROOT = Path(__file__).parent.parent.parent

CONFTEST = """
from tests.effort import skip_most_cases

def pytest_collection_modifyitems(items):
    skip_most_cases(items)
"""
TESTS = """
import pytest

@pytest.mark.one_in(5)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_many(a, b):
    pass

@pytest.mark.one_in(3)
def test_single():
    pass

@pytest.mark.parametrize("a", range(6))
def test_plain(a):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_marked.py").write_text(TESTS)
    return tmp_path


def outcomes(folder: Path, seed: int) -> dict[str, str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), **{SEED: str(seed)})
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=True)
    assert "only with --thorough: one in 5 cases is tried" in run.stdout
    return dict(re.findall(r"::(\S+) (PASSED|SKIPPED)", run.stdout))


def test_a_share_of_the_cases_is_tried_and_the_seed_chooses_it(folder: Path) -> None:
    tried = {
        seed: {name for name, how in outcomes(folder, seed).items() if how == "PASSED"} for seed in (0, 1)
    }
    for names in tried.values():
        assert sum(name.startswith("test_many") for name in names) == 3  # a fifth of 12, rounded up
        assert sum(name.startswith("test_plain") for name in names) == 6
        assert "test_single" in names  # a test is never left out as a whole
    assert tried[0] != tried[1]
