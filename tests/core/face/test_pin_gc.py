"""`megackpt pin` and `megackpt gc`: which steps are kept, which are removed; `ls` shows pins and metrics."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from megackpt import Checkpointer
from megackpt.cli import main
from tests.support.writers import SlowCommit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 6 with a loss, of which 2, 5 and 7 are incomplete; 7 is newer than the newest commit."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, {"step": step}, metrics={"loss": abs(step - 3) + 0.5})
    for step in (2, 5, 7):
        (tmp_path / f"iter_000000{step}" / "metadata.json").unlink()
    make_older(tmp_path)
    return tmp_path


def make_older(root: Path, *, minutes: float = 61) -> None:
    """Let all that is there have been written so many minutes ago."""
    then = time.time() - 60 * minutes
    for path in root.rglob("*"):
        os.utime(path, (then, then))


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main([*arguments, "--json"])
    return {"code": code, **json.loads(capsys.readouterr().out)}


def test_gc_removes_what_is_incomplete_and_what_the_policy_does_not_keep(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pin", str(root), "1"]) == 0
    before = sorted(root.rglob("*"))
    arguments = ("gc", str(root), "--keep-last", "1", "--keep-best", "loss:1")
    planned = run_json(capsys, *arguments, "--dry-run") if capsys.readouterr() else {}
    assert sorted(root.rglob("*")) == before
    done = run_json(capsys, *arguments)
    assert done["removed"] == planned["removed"]
    assert done["removed"] == [
        {"step": 2, "state": "incomplete"},
        {"step": 4, "state": "committed"},
        {"step": 5, "state": "incomplete"},
    ]
    assert done["kept"] == [
        {"step": 1, "because": ["pinned"]},
        {"step": 3, "because": ["best loss"]},
        {"step": 6, "because": ["newest", "last 1"]},
    ]
    assert (done["code"], done["not_removed"], done["dry_run"], planned["dry_run"]) == (0, [], False, True)
    assert Checkpointer(root).scan().committed == (1, 3, 6)
    assert Checkpointer(root).scan().incomplete == (7,)  # a job may be saving it
    files = [path.stem for path in (root / ".megackpt" / "metrics").iterdir()]
    assert sorted(files) == [f"iter_000000{step}" for step in (1, 3, 6, 7)]


def test_gc_removes_an_incomplete_newest_step_only_if_asked_to(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = root / "iter_0000007"
    assert run_json(capsys, "gc", str(root), "--keep-all")["incomplete_newest"] == [7]
    assert newest.is_dir()
    assert main(["gc", str(root), "--keep-all"]) == 0
    assert "newer than the newest commit: --incomplete-newest" in capsys.readouterr().out
    flags = ("--keep-all", "--incomplete-newest")
    assert run_json(capsys, "gc", str(root), *flags, "--dry-run")["removed"] == [
        {"step": 7, "state": "incomplete"}
    ]
    assert newest.is_dir()
    (newest / "now").write_text("")  # a job may be saving it
    assert run_json(capsys, "gc", str(root), *flags)["left_alone"] == []  # it holds a file that is not ours
    (newest / "now").unlink()
    os.utime(newest)
    assert run_json(capsys, "gc", str(root), *flags)["left_alone"] == [7]
    make_older(root)
    assert run_json(capsys, "gc", str(root), *flags)["removed"] == [{"step": 7, "state": "incomplete"}]
    assert not newest.exists()
    assert Checkpointer(root).steps() == (1, 3, 4, 6)


@pytest.mark.parametrize("step", [2, 4], ids=["incomplete before", "committed before"])
def test_gc_leaves_a_step_alone_that_a_job_saves_again(
    root: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    slow = SlowCommit()
    job = Checkpointer(root)
    saving = threading.Thread(
        target=job.save,
        args=(step, {"step": -step}),
        kwargs={"metrics": {"loss": 0.1}, "sharded_strategy": slow},
    )
    saving.start()
    assert slow.is_written.wait(60)
    planned = run_json(capsys, "gc", str(root), "--keep-last", "1")
    assert (planned["left_alone"], planned["code"]) == ([step], 0)
    assert main(["gc", str(root), "--keep-last", "1"]) == 0
    assert "left alone" in capsys.readouterr().out
    slow.goes_on.set()
    saving.join()
    assert job.failed_saves == 0
    assert Checkpointer(root).steps() == (step, 6)
    assert job.load({}, step)["step"] == -step
    assert job.metrics(step) == {"loss": 0.1}


def test_gc_takes_what_is_old_enough_and_does_not_touch_metrics_of_steps_to_come(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = root / "iter_0000002" / "data"
    data.mkdir()
    (data / "0123456789abcdef-00000.safetensors").write_bytes(b"")
    metrics = root / ".megackpt" / "metrics" / "iter_0000000.json"
    metrics.write_text("{}")
    assert run_json(capsys, "gc", str(root), "--keep-all")["left_alone"] == [2]
    make_older(root, minutes=11)
    assert run_json(capsys, "gc", str(root), "--keep-all", "--min-age", "10")["left_alone"] == []
    assert not (root / "iter_0000002").exists()
    assert metrics.exists()


def test_gc_keeps_the_newest_undamaged_step_besides_a_damaged_newest(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "iter_0000006" / "metadata.json").write_text("{")
    done = run_json(capsys, "gc", str(root), "--keep-last", "1")
    assert done["kept"] == [
        {"step": 4, "because": ["good"]},
        {"step": 6, "because": ["newest", "last 1"]},
    ]


def test_gc_has_no_default_for_what_to_keep(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(root.rglob("*"))
    for arguments in ([], ["--keep-all", "--keep-last", "2"], ["--keep-last", "0"], ["--keep-best", "l:0"]):
        assert main(["gc", str(root), *arguments]) == 2
    assert "Give the steps to keep" in capsys.readouterr().err
    (root / "empty").mkdir()
    assert main(["gc", str(root / "empty"), "--keep-all"]) == 3
    assert main(["gc", str(root / "iter_0000001"), "--keep-all"]) == 3
    (root / "empty").rmdir()
    assert sorted(root.rglob("*")) == before
    assert main(["gc", str(root), "--keep-all"]) == 0
    out, err = capsys.readouterr()
    assert "2 removed, 4 kept" in out
    assert "A job may be saving there right now" in err
    assert Checkpointer(root).steps() == (1, 3, 4, 6)


def test_pin_shows_what_is_pinned_and_rejects_what_is_not_committed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pin", str(root), "3"]) == 0
    assert "step 3 is pinned; pinned: 3." in capsys.readouterr().out
    assert run_json(capsys, "pin", str(root), "1")["pins"] == [1, 3]
    assert run_json(capsys, "pin", str(root), "--list")["pins"] == [1, 3]
    assert main(["pin", str(root), "1", "--remove"]) == 0
    assert "step 1 is no longer pinned; pinned: 3." in capsys.readouterr().out
    assert main(["pin", str(root), "1", "--remove"]) == 0
    assert "step 1 was not pinned" in capsys.readouterr().out
    assert main(["pin", str(root), "5"]) == 3
    assert "iter_0000005 is not committed" in capsys.readouterr().err
    for wrong in ([], ["3", "--list"], ["--list", "--remove"], ["three"]):
        assert main(["pin", str(root), *wrong]) == 2


def test_ls_shows_pins_and_metrics(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pin", str(root), "6"])
    steps = run_json(capsys, "ls", str(root))["steps"] if capsys.readouterr() else []
    assert [(s["step"], s["pinned"], s["metrics"]) for s in steps if s["state"] == "committed"] == [
        (1, False, {"loss": 2.5}),
        (3, False, {"loss": 0.5}),
        (4, False, {"loss": 1.5}),
        (6, True, {"loss": 3.5}),
    ]
    main(["ls", str(root)])
    out = capsys.readouterr().out
    assert "committed, latest, pinned" in out
    assert "loss 0.5" in out
