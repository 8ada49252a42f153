"""Commands on the root of a run: ls, pin and gc, and the latest step that all others take."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from megackpt import Checkpointer, ShardedTensor
from megackpt.cli import main
from megackpt.cli.ls import age_as_text, list_steps
from megackpt.storage import ObjectStore
from tests.support.s3_server import BUCKET, S3Server, options_for
from tests.support.states import filled
from tests.support.writers import SlowCommit


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
    now = time.time()
    for step, age_s in ((2, 3600), (3, 60)):
        for file in (root / f"iter_000000{step}").rglob("*"):
            os.utime(file, (now - age_s, now - age_s))
        os.utime(root / f"iter_000000{step}", (now - age_s, now - age_s))
    by_step = {step.step: step for step in list_steps(root)}
    since = time.time() - now
    assert 3600 <= by_step[2].age_s <= 3600 + since
    assert 60 <= by_step[3].age_s <= 60 + since


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
    assert all(step["age_s"] >= 0 for step in result["steps"])
    assert main(["ls", url]) == 0
    assert "committed, latest" in capsys.readouterr().out
    assert main(["ls", f"{url}/iter_0000002"]) == 3
    assert main(["ls", f"{url}-not-there"]) == 0
    assert main(["inspect", url, "--json"]) == 0
    assert "its latest step is" in capsys.readouterr().err


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A run with steps 1 and 2, and an incomplete newer one."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            tensor = filled(step, 4)
            checkpointer.save(step, {"w": tensor})
    (tmp_path / "run" / "iter_0000003" / "metadata.json").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_the_latest_step_is_taken_and_named(
    short: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(short), "--json"]) == 0
    message = capsys.readouterr()
    assert json.loads(message.out)["location"] == str(short / "iter_0000002")
    assert (
        message.err == f"megackpt: {short} is the root of a run; its latest step is {short}/iter_0000002.\n"
    )


def test_a_step_is_taken_without_a_message(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(short / "iter_0000001")]) == 0
    assert capsys.readouterr().err == ""


def test_diff_and_convert_take_it_too(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(short), str(short / "iter_0000002")]) == 0
    assert main(["diff", str(short), str(short / "iter_0000001")]) == 1
    assert main(["convert", str(short), str(tmp_path / "new"), "--to", "megackpt"]) == 0
    assert main(["diff", str(tmp_path / "new"), str(short / "iter_0000002")]) == 0
    assert capsys.readouterr().err.count("its latest step is") == 3


def test_repair_changes_no_step_that_was_not_named(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(short)]) == 3
    assert f"the latest is {short}/iter_0000002" in capsys.readouterr().err


def test_a_root_without_a_committed_step_is_no_checkpoint(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        (short / f"iter_000000{step}" / "metadata.json").unlink()
    assert main(["verify", str(short)]) == 3
    assert "is not a checkpoint" in capsys.readouterr().err


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Steps 1 to 6 with a loss, of which 2, 5 and 7 are incomplete; 7 is newer than the newest commit."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, {"step": step}, metrics={"loss": abs(step - 3) + 0.5})
    for step in (2, 5, 7):
        (tmp_path / f"iter_000000{step}" / "metadata.json").unlink()
    make_older(tmp_path)
    return tmp_path


def make_older(scored: Path, *, minutes: float = 61) -> None:
    """Let all that is there have been written so many minutes ago."""
    then = time.time() - 60 * minutes
    for path in scored.rglob("*"):
        os.utime(path, (then, then))


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main([*arguments, "--json"])
    return {"code": code, **json.loads(capsys.readouterr().out)}


def test_gc_removes_what_is_incomplete_and_what_the_policy_does_not_keep(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pin", str(scored), "1"]) == 0
    before = sorted(scored.rglob("*"))
    arguments = ("gc", str(scored), "--keep-last", "1", "--keep-best", "loss:1")
    planned = run_json(capsys, *arguments, "--dry-run") if capsys.readouterr() else {}
    assert sorted(scored.rglob("*")) == before
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
    assert Checkpointer(scored).scan().committed == (1, 3, 6)
    assert Checkpointer(scored).scan().incomplete == (7,)  # a job may be saving it
    files = [path.stem for path in (scored / ".megackpt" / "metrics").iterdir()]
    assert sorted(files) == [f"iter_000000{step}" for step in (1, 3, 6, 7)]


def test_gc_removes_an_incomplete_newest_step_only_if_asked_to(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = scored / "iter_0000007"
    assert run_json(capsys, "gc", str(scored), "--keep-all")["incomplete_newest"] == [7]
    assert newest.is_dir()
    assert main(["gc", str(scored), "--keep-all"]) == 0
    assert "newer than the newest commit: --incomplete-newest" in capsys.readouterr().out
    flags = ("--keep-all", "--incomplete-newest")
    assert run_json(capsys, "gc", str(scored), *flags, "--dry-run")["removed"] == [
        {"step": 7, "state": "incomplete"}
    ]
    assert newest.is_dir()
    (newest / "now").write_text("")  # a job may be saving it
    assert run_json(capsys, "gc", str(scored), *flags)["left_alone"] == []  # it holds a file that is not ours
    (newest / "now").unlink()
    os.utime(newest)
    assert run_json(capsys, "gc", str(scored), *flags)["left_alone"] == [7]
    make_older(scored)
    assert run_json(capsys, "gc", str(scored), *flags)["removed"] == [{"step": 7, "state": "incomplete"}]
    assert not newest.exists()
    assert Checkpointer(scored).steps() == (1, 3, 4, 6)


@pytest.mark.parametrize("step", [2, 4], ids=["incomplete before", "committed before"])
def test_gc_leaves_a_step_alone_that_a_job_saves_again(
    scored: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    slow = SlowCommit()
    job = Checkpointer(scored)
    saving = threading.Thread(
        target=job.save,
        args=(step, {"step": -step}),
        kwargs={"metrics": {"loss": 0.1}, "sharded_strategy": slow},
    )
    saving.start()
    assert slow.is_written.wait(600)
    planned = run_json(capsys, "gc", str(scored), "--keep-last", "1")
    assert (planned["left_alone"], planned["code"]) == ([step], 0)
    assert main(["gc", str(scored), "--keep-last", "1"]) == 0
    assert "left alone" in capsys.readouterr().out
    slow.goes_on.set()
    saving.join()
    assert job.failed_saves == 0
    assert Checkpointer(scored).steps() == (step, 6)
    assert job.load({}, step)["step"] == -step
    assert job.metrics(step) == {"loss": 0.1}


def test_gc_takes_what_is_old_enough_and_does_not_touch_metrics_of_steps_to_come(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = scored / "iter_0000002" / "data"
    data.mkdir()
    (data / "0123456789abcdef-00000.safetensors").write_bytes(b"")
    metrics = scored / ".megackpt" / "metrics" / "iter_0000000.json"
    metrics.write_text("{}")
    assert run_json(capsys, "gc", str(scored), "--keep-all")["left_alone"] == [2]
    make_older(scored, minutes=11)
    assert run_json(capsys, "gc", str(scored), "--keep-all", "--min-age", "10")["left_alone"] == []
    assert not (scored / "iter_0000002").exists()
    assert metrics.exists()


def test_gc_keeps_the_newest_undamaged_step_besides_a_damaged_newest(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scored / "iter_0000006" / "metadata.json").write_text("{")
    done = run_json(capsys, "gc", str(scored), "--keep-last", "1")
    assert done["kept"] == [
        {"step": 4, "because": ["good"]},
        {"step": 6, "because": ["newest", "last 1"]},
    ]


def test_gc_has_no_default_for_what_to_keep(scored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(scored.rglob("*"))
    for arguments in ([], ["--keep-all", "--keep-last", "2"], ["--keep-last", "0"], ["--keep-best", "l:0"]):
        assert main(["gc", str(scored), *arguments]) == 2
    assert "Give the steps to keep" in capsys.readouterr().err
    (scored / "empty").mkdir()
    assert main(["gc", str(scored / "empty"), "--keep-all"]) == 3
    assert main(["gc", str(scored / "iter_0000001"), "--keep-all"]) == 3
    (scored / "empty").rmdir()
    assert sorted(scored.rglob("*")) == before
    assert main(["gc", str(scored), "--keep-all"]) == 0
    out, err = capsys.readouterr()
    assert "2 removed, 4 kept" in out
    assert "A job may be saving there right now" in err
    assert Checkpointer(scored).steps() == (1, 3, 4, 6)


def test_pin_shows_what_is_pinned_and_rejects_what_is_not_committed(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pin", str(scored), "3"]) == 0
    assert "step 3 is pinned; pinned: 3." in capsys.readouterr().out
    assert run_json(capsys, "pin", str(scored), "1")["pins"] == [1, 3]
    assert run_json(capsys, "pin", str(scored), "--list")["pins"] == [1, 3]
    assert main(["pin", str(scored), "1", "--remove"]) == 0
    assert "step 1 is no longer pinned; pinned: 3." in capsys.readouterr().out
    assert main(["pin", str(scored), "1", "--remove"]) == 0
    assert "step 1 was not pinned" in capsys.readouterr().out
    assert main(["pin", str(scored), "5"]) == 3
    assert "iter_0000005 is not committed" in capsys.readouterr().err
    for wrong in ([], ["3", "--list"], ["--list", "--remove"], ["three"]):
        assert main(["pin", str(scored), *wrong]) == 2


def test_ls_shows_pins_and_metrics(scored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pin", str(scored), "6"])
    steps = run_json(capsys, "ls", str(scored))["steps"] if capsys.readouterr() else []
    assert [(s["step"], s["pinned"], s["metrics"]) for s in steps if s["state"] == "committed"] == [
        (1, False, {"loss": 2.5}),
        (3, False, {"loss": 0.5}),
        (4, False, {"loss": 1.5}),
        (6, True, {"loss": 3.5}),
    ]
    main(["ls", str(scored)])
    out = capsys.readouterr().out
    assert "committed, latest, pinned" in out
    assert "loss 0.5" in out
