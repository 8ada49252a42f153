"""`megackpt ls`: which steps a run has, and which one would be loaded."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from megackpt import Checkpointer, ShardedTensor
from megackpt.cli import main
from megackpt.cli.ls import age_as_text, list_steps
from megackpt.storage import ObjectStore
from tests.support.s3_server import BUCKET, S3Server, options_for


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2 committed, 3 incomplete, 4 with a damaged commit; a directory of somebody else."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3, 4):
            tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(100 * step))
            checkpointer.save(step, {"w": tensor}, sharded_strategy="torch_dist" if step == 1 else None)
    (tmp_path / "iter_0000003" / "metadata.json").unlink()
    (tmp_path / "iter_0000004" / "metadata.json").write_text("{")
    (tmp_path / "tensorboard").mkdir()
    return tmp_path


def test_steps_come_with_state_format_ranks_and_size(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(root), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    listed = [(s["step"], s["state"], s["format"], s["world_size"]) for s in result["steps"]]
    assert listed == [
        (1, "committed", "torch_dist:1", None),
        (2, "committed", "megackpt:1", 1),
        (3, "incomplete", None, None),
        (4, "unreadable", None, None),
    ]
    files = [f for f in (root / "iter_0000002").rglob("*") if f.is_file()]
    assert result["steps"][1]["nbytes"] == sum(f.stat().st_size for f in files)


def test_the_latest_is_the_step_that_a_checkpointer_would_load(root: Path) -> None:
    shutil.rmtree(root / "iter_0000004")
    (latest,) = [step.step for step in list_steps(root) if step.latest]
    assert latest == Checkpointer(root).latest() == 2


def test_age_is_counted_from_the_commit(root: Path) -> None:
    hour = time.time() - 3600
    os.utime(root / "iter_0000002" / "metadata.json", (hour, hour))
    by_step = {step.step: step for step in list_steps(root)}
    assert 3600 <= by_step[2].age_s < 3700
    assert 0 <= by_step[3].age_s < 100


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 h"), (2e6, "23 d")]
)
def test_ages_are_shown_in_the_largest_unit_that_they_have_two_of(seconds: float, text: str) -> None:
    assert age_as_text(seconds) == text


def test_a_table_marks_the_latest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "iter_0000004")
    assert main(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "committed, latest" in line] == ["2"]
    assert any("incomplete" in line for line in lines)


def test_a_root_without_steps_is_fine_and_anything_else_is_not(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["ls", str(empty)]) == 0
    assert "no steps" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "nowhere")]) == 3
    assert "is not a directory" in capsys.readouterr().err
    assert main(["ls", str(root / "iter_0000002")]) == 3
    assert "single checkpoint" in capsys.readouterr().err
    assert main(["ls"]) == 2


def test_a_url_is_listed_as_a_directory_is(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(s3_server.port)
    for name in ("endpoint", "access_key_id", "secret_access_key", "region"):
        variable = "AWS_ENDPOINT_URL" if name == "endpoint" else f"AWS_{name.upper()}"
        monkeypatch.setenv(variable, options.config[name])
    url = f"s3://{BUCKET}/listed"
    with Checkpointer(url) as checkpointer:
        for step in (1, 2, 3):
            tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(100 * step))
            checkpointer.save(step, {"w": tensor}, metrics={"loss": 1.0 / step})
    ObjectStore(f"{url}/iter_0000003").delete(["metadata.json"])
    assert main(["pin", url, "1"]) == 0
    capsys.readouterr()
    assert main(["ls", url, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["latest"] == 2
    listed = [(s["step"], s["state"], s["format"], s["pinned"]) for s in result["steps"]]
    assert listed == [
        (1, "committed", "megackpt:1", True),
        (2, "committed", "megackpt:1", False),
        (3, "incomplete", None, False),
    ]
    second = ObjectStore(f"{url}/iter_0000002")
    assert result["steps"][1]["nbytes"] == sum(map(second.size, second.names()))
    assert result["steps"][1]["metrics"] == {"loss": 0.5}
    assert all(0 <= step["age_s"] < 600 for step in result["steps"])
    assert main(["ls", url]) == 0
    assert "committed, latest" in capsys.readouterr().out
    assert main(["ls", f"{url}/iter_0000002"]) == 3
    assert main(["ls", f"{url}-not-there"]) == 0
    assert main(["inspect", url, "--json"]) == 0
    assert "its latest step is" in capsys.readouterr().err
