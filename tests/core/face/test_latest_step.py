"""Commands that read a checkpoint take the latest step of a run's root, and name it on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megackpt import Checkpointer
from megackpt.cli import main
from tests.support.states import filled


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with steps 1 and 2, and an incomplete newer one."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            tensor = filled(step, 4)
            checkpointer.save(step, {"w": tensor})
    (tmp_path / "run" / "iter_0000003" / "metadata.json").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_the_latest_step_is_taken_and_named(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(root), "--json"]) == 0
    message = capsys.readouterr()
    assert json.loads(message.out)["location"] == str(root / "iter_0000002")
    assert message.err == f"megackpt: {root} is the root of a run; its latest step is {root}/iter_0000002.\n"


def test_a_step_is_taken_without_a_message(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root / "iter_0000001")]) == 0
    assert capsys.readouterr().err == ""


def test_diff_and_convert_take_it_too(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(root), str(root / "iter_0000002")]) == 0
    assert main(["diff", str(root), str(root / "iter_0000001")]) == 1
    assert main(["convert", str(root), str(tmp_path / "new"), "--to", "megackpt"]) == 0
    assert main(["diff", str(tmp_path / "new"), str(root / "iter_0000002")]) == 0
    assert capsys.readouterr().err.count("its latest step is") == 3


def test_repair_changes_no_step_that_was_not_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(root)]) == 3
    assert f"the latest is {root}/iter_0000002" in capsys.readouterr().err


def test_a_root_without_a_committed_step_is_no_checkpoint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        (root / f"iter_000000{step}" / "metadata.json").unlink()
    assert main(["verify", str(root)]) == 3
    assert "is not a checkpoint" in capsys.readouterr().err
