"""Commands on the root of a run: ls, pin and gc, and the latest step that all others take."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import Checkpointer, ShardedTensor
from megackpt.cli.ls import late_line, new_lines
from megackpt.cli.run_steps import age_as_text, list_steps
from megackpt.storage import ObjectStore
from tests.support.command_line import CommandLine
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


def test_steps_come_with_state_format_ranks_and_size(root: Path, cli: CommandLine) -> None:
    result = cli.json("ls", root)
    listed = [(s["step"], s["state"], s["format"], s["world_size"]) for s in result["steps"]]
    assert listed == [
        (1, "committed", "torch_dist:1", None),
        (2, "committed", "megackpt:1", 1),
        (3, "incomplete", None, None),
        (4, "unreadable", None, None),
    ]
    files = [f for f in (root / "iter_0000002").rglob("*") if f.is_file()]
    assert result["steps"][1]["nbytes"] == sum(f.stat().st_size for f in files)
    out = cli.out("ls", root)
    assert [state for state in ("committed", "incomplete", "unreadable") if state not in out] == []


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


def test_a_root_without_steps_is_fine_and_anything_else_is_not(
    tmp_path: Path, root: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no steps" in cli.out("ls", empty)
    assert "is not a directory" in cli.err("ls", tmp_path / "nowhere", code=3)
    assert "single checkpoint" in cli.err("ls", root / "iter_0000002", code=3)
    monkeypatch.chdir(root)
    assert cli.json("ls")["root"] == cli.json("ls", ".")["root"]


def test_a_url_is_listed_as_a_directory_is(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
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
    cli.run("pin", url, "1")
    result = cli.json("ls", url)
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
    assert "committed, latest" in cli.out("ls", url)
    cli.run("ls", f"{url}/iter_0000002", code=3)
    cli.run("ls", f"{url}-not-there")
    assert "its latest step is" in cli.err("inspect", url, "--json", code=0)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A run with steps 1 and 2, and an incomplete newer one."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": filled(step, 4)})
    (tmp_path / "run" / "iter_0000003" / "metadata.json").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_the_latest_step_is_taken_and_named(short: Path, command: str, cli: CommandLine) -> None:
    out, err = cli.run(command, short, "--json")
    assert json.loads(out)["location"] == str(short / "iter_0000002")
    assert err == f"megackpt: {short} is the root of a run; its latest step is {short}/iter_0000002.\n"


def test_a_step_is_taken_without_a_message(short: Path, cli: CommandLine) -> None:
    assert cli.err("verify", short / "iter_0000001", code=0) == ""


def test_diff_and_convert_take_it_too(short: Path, tmp_path: Path, cli: CommandLine) -> None:
    assert "its latest step is" in cli.err("diff", short, short / "iter_0000002", code=0)
    assert "its latest step is" in cli.err("diff", short, short / "iter_0000001", code=1)
    assert "its latest step is" in cli.err("convert", short, tmp_path / "new", "--to", "megackpt", code=0)
    assert cli.err("diff", tmp_path / "new", short / "iter_0000002", code=0) == ""


def test_repair_changes_no_step_that_was_not_named(short: Path, cli: CommandLine) -> None:
    assert f"the latest is {short}/iter_0000002" in cli.err("repair", short, code=3)


def test_a_root_without_a_committed_step_is_no_checkpoint(short: Path, cli: CommandLine) -> None:
    for step in (1, 2):
        (short / f"iter_000000{step}" / "metadata.json").unlink()
    assert "is not a checkpoint" in cli.err("verify", short, code=3)


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


def test_gc_removes_what_is_incomplete_and_what_the_policy_does_not_keep(
    scored: Path, cli: CommandLine
) -> None:
    cli.run("pin", scored, 1)
    before = sorted(scored.rglob("*"))
    arguments = ("gc", scored, "--keep-last", "1", "--keep-best", "loss:1")
    planned = cli.json(*arguments, "--dry-run")
    assert sorted(scored.rglob("*")) == before
    done = cli.json(*arguments)
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
    assert (done["not_removed"], done["dry_run"], planned["dry_run"]) == ([], False, True)
    assert Checkpointer(scored).scan().committed == (1, 3, 6)
    assert Checkpointer(scored).scan().incomplete == (7,)  # a job may be saving it
    files = [path.stem for path in (scored / ".megackpt" / "metrics").iterdir()]
    assert sorted(files) == [f"iter_000000{step}" for step in (1, 3, 6, 7)]


def test_gc_removes_an_incomplete_newest_step_only_if_asked_to(scored: Path, cli: CommandLine) -> None:
    newest = scored / "iter_0000007"
    assert cli.json("gc", scored, "--keep-all")["incomplete_newest"] == [7]
    assert newest.is_dir()
    assert "newer than the newest commit: --incomplete-newest" in cli.out("gc", scored, "--keep-all")
    flags = ("--keep-all", "--incomplete-newest")
    removed = [{"step": 7, "state": "incomplete"}]
    assert cli.json("gc", scored, *flags, "--dry-run")["removed"] == removed
    assert newest.is_dir()
    (newest / "now").write_text("")  # a job may be saving it
    assert cli.json("gc", scored, *flags)["left_alone"] == []  # it holds a file that is not ours
    (newest / "now").unlink()
    os.utime(newest)
    assert cli.json("gc", scored, *flags)["left_alone"] == [7]
    make_older(scored)
    assert cli.json("gc", scored, *flags)["removed"] == removed
    assert not newest.exists()
    assert Checkpointer(scored).steps() == (1, 3, 4, 6)


@pytest.mark.parametrize("step", [2, 4], ids=["incomplete before", "committed before"])
def test_gc_leaves_a_step_alone_that_a_job_saves_again(scored: Path, cli: CommandLine, step: int) -> None:
    slow = SlowCommit()
    job = Checkpointer(scored)
    options: dict[str, Any] = {"metrics": {"loss": 0.1}, "sharded_strategy": slow}
    saving = threading.Thread(target=job.save, args=(step, {"step": -step}), kwargs=options)
    saving.start()
    assert slow.is_written.wait(600)
    planned = cli.json("gc", scored, "--keep-last", "1")
    assert planned["left_alone"] == [step]
    assert "left alone" in cli.out("gc", scored, "--keep-last", "1")
    slow.goes_on.set()
    saving.join()
    assert job.failed_saves == 0
    assert Checkpointer(scored).steps() == (step, 6)
    assert job.load({}, step)["step"] == -step
    assert job.metrics(step) == {"loss": 0.1}


def test_gc_takes_what_is_old_enough_and_does_not_touch_metrics_of_steps_to_come(
    scored: Path, cli: CommandLine
) -> None:
    data = scored / "iter_0000002" / "data"
    data.mkdir()
    (data / "0123456789abcdef-00000.safetensors").write_bytes(b"")
    metrics = scored / ".megackpt" / "metrics" / "iter_0000000.json"
    metrics.write_text("{}")
    assert cli.json("gc", scored, "--keep-all")["left_alone"] == [2]
    make_older(scored, minutes=11)
    assert cli.json("gc", scored, "--keep-all", "--min-age", "10")["left_alone"] == []
    assert not (scored / "iter_0000002").exists()
    assert metrics.exists()


def test_gc_keeps_a_damaged_newest_step_and_the_newest_undamaged_one(scored: Path, cli: CommandLine) -> None:
    (scored / "iter_0000006" / "metadata.json").write_text("{")
    done = cli.json("gc", scored, "--keep-last", "1")
    assert done["kept"] == [{"step": 4, "because": ["good"]}, {"step": 6, "because": ["newest", "last 1"]}]


def test_gc_has_no_default_for_what_to_keep(scored: Path, cli: CommandLine) -> None:
    before = sorted(scored.rglob("*"))
    assert "Give the steps to keep" in cli.err("gc", scored, code=2)
    for arguments in (["--keep-all", "--keep-last", "2"], ["--keep-last", "0"], ["--keep-best", "l:0"]):
        cli.run("gc", scored, *arguments, code=2)
    (scored / "empty").mkdir()
    cli.run("gc", scored / "empty", "--keep-all", code=3)
    cli.run("gc", scored / "iter_0000001", "--keep-all", code=3)
    (scored / "empty").rmdir()
    assert sorted(scored.rglob("*")) == before
    out, err = cli.run("gc", scored, "--keep-all")
    assert "2 steps removed" in out
    assert "A job may be saving there right now" in err
    assert Checkpointer(scored).steps() == (1, 3, 4, 6)


def test_pin_shows_what_is_pinned_and_rejects_what_is_not_committed(scored: Path, cli: CommandLine) -> None:
    assert "step 3 is pinned; pinned: 3." in cli.out("pin", scored, "3")
    assert cli.json("pin", scored, "1")["pins"] == [1, 3]
    assert cli.json("pin", scored)["pins"] == [1, 3]
    assert "step 1 is no longer pinned; pinned: 3." in cli.out("pin", scored, "1", "--remove")
    assert "step 1 was not pinned" in cli.out("pin", scored, "1", "--remove")
    assert "iter_0000005 is not committed" in cli.err("pin", scored, "5", code=3)
    for wrong in (["--remove"], ["three"]):
        cli.run("pin", scored, *wrong, code=2)


def test_ls_shows_pins_and_metrics(scored: Path, cli: CommandLine) -> None:
    cli.run("pin", scored, 6)
    steps = cli.json("ls", scored)["steps"]
    assert [(s["step"], s["pinned"], s["metrics"]) for s in steps if s["state"] == "committed"] == [
        (1, False, {"loss": 2.5}),
        (3, False, {"loss": 0.5}),
        (4, False, {"loss": 1.5}),
        (6, True, {"loss": 3.5}),
    ]
    out = cli.out("ls", scored)
    assert "committed, latest, pinned" in out
    assert "loss 0.5" in out


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """A run with the steps 1 to 4 that has gone back to step 2 and saved steps 3 and 9."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3, 4, 20):
            checkpointer.save(step, {"value": step}, metrics={"loss": step})
        checkpointer.load({}, 2)
        for step in (3, 9):
            checkpointer.save(step, {"value": -step})
    return tmp_path / "run"


def test_ls_shows_branches_and_what_was_left_behind(branched: Path, cli: CommandLine) -> None:
    rows = [line.split("│") for line in cli.out("ls", branched).splitlines() if "committed" in line]
    shown = [tuple(cell.strip() for cell in row[1:4]) for row in rows]
    assert shown == [
        ("1", "committed", "0"),
        ("2", "committed", "0, after 1"),
        ("3", "committed", "1, after 2"),
        ("4", "committed, abandoned", "0, after 3"),
        ("9", "committed, latest", "1, after 3"),
        ("20", "committed, abandoned", "0, after 4"),
    ]
    out = cli.out("ls", branched)
    assert "2 steps (" in out
    assert f"`megackpt gc {branched} --keep-all --abandoned` removes them" in out
    steps = cli.json("ls", branched)["steps"]
    assert [step["branch"] for step in steps] == [0, 0, 1, 0, 1, 0]
    assert len({step["run"] for step in steps}) == 2


def test_rollback_moves_newer_steps_aside_and_a_restart_takes_the_step(
    branched: Path, cli: CommandLine
) -> None:
    Checkpointer(branched).pin(20)
    assert "Nobody can be asked here, so give --yes" in cli.err("rollback", branched, 2, code=2)
    assert Checkpointer(branched).latest() == 9
    out = cli.out("rollback", branched, 2, "--yes")
    assert f"4 steps moved to {branched}/rolled-back-1: 3, 4, 9, 20. A restart takes step 2." in out
    assert Checkpointer(branched).load({})["value"] == 2
    assert (branched / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert Checkpointer(branched).pins() == ()
    aside = Checkpointer(branched / "rolled-back-1")
    assert (aside.steps(), aside.pins(), aside.metrics(20)) == ((3, 4, 9, 20), (20,), {"loss": 20.0})
    result = cli.json("rollback", branched, 1, "--yes", "--remove")
    assert (result["steps"], result["latest"], result["moved_to"]) == ([2], 1, None)
    assert "No step is newer, and nothing was changed" in cli.out("rollback", branched, 1)
    assert "Name one of the committed steps: 1" in cli.err("rollback", branched, 7, code=3)


def test_rollback_removes_no_pinned_step_and_takes_lower_numbers_of_newer_branches(
    branched: Path, cli: CommandLine
) -> None:
    Checkpointer(branched).pin(9)
    assert "the steps 9 are pinned" in cli.err("rollback", branched, 4, "--yes", "--remove", code=2)
    assert cli.json("rollback", branched, 4, "--yes")["steps"] == [3, 9, 20]
    assert Checkpointer(branched).latest() == 4


def is_data(path: Path) -> bool:
    return path.is_file() and (path.parent.name == "data" or path.suffix == ".distcp")


@pytest.mark.parametrize("format", [None, "torch_dist"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_ls_shows_damage_that_sizes_prove(tmp_path: Path, cli: CommandLine, format: Any, damage: str) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(1000))
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": tensor}, sharded_strategy=format)
    files = [path for path in (tmp_path / "iter_0000002").rglob("*") if is_data(path)]
    if damage == "missing":
        files[0].unlink()
    else:
        os.truncate(files[0], files[0].stat().st_size // 2)
    steps = cli.json("ls", tmp_path)["steps"]
    assert [step["state"] for step in steps] == ["committed", "damaged"]
    assert files[0].name in cli.out("ls", tmp_path)


def test_follow_shows_when_a_step_was_saved_how_long_it_took_and_when_the_next_is_due(root: Path) -> None:
    steps = [step for step in list_steps(root) if step.step <= 2]
    steps = [replace(steps[0], age_s=700.0), replace(steps[1], age_s=100.0, took_s=2.5)]
    seen: dict[int, float] = {}
    (line,) = new_lines(steps, seen, now=time.time())
    assert late_line(seen, now=time.time() + 1000.0) == ""
    assert "no step since step 2: the next was due 15 min ago" in late_line(seen, now=time.time() + 1400.5)
    assert "step 2 saved" in line
    assert "took 2.5 s; 10 min after the one before; next due" in line
    assert list(new_lines(steps, seen, now=time.time())) == []
    later = [*steps, replace(steps[1], step=3, age_s=0.0)]
    (line,) = new_lines(later, seen, now=time.time())
    assert "step 3 saved" in line
