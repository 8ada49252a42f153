"""`megackpt verify ROOT --all`: the right verdict on each step, and the newest good one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from megackpt import Checkpointer, SaveOptions, ShardedTensor
from tests.support.checkpoints import flip
from tests.support.command_line import CommandLine
from tests.support.effort import few


def save(root: Path, step: int, *, parity: bool = False, format: str | None = None) -> Path:
    """Save a step; return its directory."""
    options = SaveOptions(parity=1) if parity else SaveOptions()
    tensor = ShardedTensor.from_rank_offsets("w", torch.full((1000,), float(step)))
    checkpointer = Checkpointer(root, save_options=options)
    checkpointer.save(step, {"w": tensor, "step": step}, sharded_strategy=format)
    return checkpointer.directory(step)


def data_file(step: Path) -> Path:
    return next(iter(sorted((step / "data").iterdir())))


def flip_last(path: Path) -> None:
    flip(path, path.stat().st_size - 10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A step in each state."""
    save(tmp_path, 1)
    flip_last(data_file(save(tmp_path, 2)))
    flip_last(data_file(save(tmp_path, 3, parity=True)))
    cut = data_file(save(tmp_path, 4))
    cut.write_bytes(cut.read_bytes()[:-100])
    data_file(save(tmp_path, 5)).unlink()
    (index,) = save(tmp_path, 6).glob("index-*")
    flip_last(index)
    (common,) = save(tmp_path, 7).glob("common-*.json")
    flip_last(common)
    save(tmp_path, 8, format="torch_dist")
    flipped = save(tmp_path, 9, parity=True)
    flip_last(data_file(flipped))
    for parity in (flipped / "parity").iterdir():
        parity.unlink()
    unknown = save(tmp_path, 10) / "metadata.json"
    unknown.write_text(json.dumps(json.loads(unknown.read_text()) | {"sharded_backend": "later"}))
    later = save(tmp_path, 13)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({"step": 0}, 8)
    checkpointer.save(11, {"step": 11})  # 13 is abandoned
    assert later.is_dir()
    (checkpointer.directory(11) / "metadata.json").write_text("{")
    for step in (12, 14):
        checkpointer.save(step, {"step": step})
    (checkpointer.directory(12) / "metadata.json").unlink()
    (common,) = checkpointer.directory(14).glob("common-*.json")
    common.unlink()
    return tmp_path


DEEP = {
    1: ("whole", ""),
    2: ("damaged", ""),
    3: ("damaged", "all"),
    4: ("damaged", ""),
    5: ("damaged", ""),
    6: ("damaged", ""),
    7: ("damaged", ""),
    8: ("whole", ""),
    9: ("damaged", "nothing"),
    10: ("unreadable", ""),
    11: ("unreadable", ""),
    12: ("incomplete", ""),
    13: ("whole", ""),
    14: ("damaged", ""),
}


def test_each_state_of_a_step_gets_its_verdict_and_the_last_line_names_the_newest_good_step(
    root: Path, cli: CommandLine
) -> None:
    result = cli.json("verify", root, "--all", "--deep", code=1)
    assert {row["step"]: (row["state"], row["repair"]) for row in result["steps"]} == DEEP
    assert [row["step"] for row in result["steps"] if row["abandoned"]] == [9, 13]
    assert (result["newest_good"], result["latest"]) == (8, 14)
    lines = cli.out("verify", root, "--all", "--deep", code=1).splitlines()
    assert lines[-1] == "newest good step: 8"
    assert "megackpt repair" in lines[-2]
    shallow = cli.json("verify", root, "--all", code=1)["steps"]
    assert [row["state"] for row in shallow if row["step"] in (1, 2, 4, 8)] == [
        "undamaged",
        "undamaged",
        "damaged",
        "undamaged",
    ]


def test_a_run_without_damage_is_no_fault_and_one_without_steps_is_no_run(
    tmp_path: Path, cli: CommandLine
) -> None:
    save(tmp_path, 1)
    assert cli.out("verify", tmp_path, "--all", "--deep").splitlines()[-1] == "newest good step: 1"
    shutil.rmtree(tmp_path / "iter_0000001")
    assert "has no steps" in cli.err("verify", tmp_path, "--all", code=3)


def test_gc_names_damaged_steps_that_it_keeps_and_the_newest_without_damage(
    tmp_path: Path, cli: CommandLine
) -> None:
    steps = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    for step in steps[2:]:
        data_file(step).unlink()
    nbytes = sum(file.stat().st_size for file in steps[0].rglob("*") if file.is_file())
    out = cli.out("gc", tmp_path, "--keep-last", 2, "--dry-run")
    assert "newest without damage" in out
    assert "Damaged steps are kept: 3, 4. The newest without damage is step 2." in out
    result = cli.json("gc", tmp_path, "--keep-last", 2)
    assert (result["damaged"], result["newest_undamaged"]) == ([3, 4], 2)
    assert result["freed_nbytes"] == nbytes
    assert [row["step"] for row in result["kept"]] == [2, 3, 4]


def test_gc_removes_abandoned_steps_only_if_asked(tmp_path: Path, cli: CommandLine) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({"step": 0}, 1)
    checkpointer.save(5, {"step": 5})
    checkpointer.pin(2)
    kept = cli.json("gc", tmp_path, "--keep-last", 1)["kept"]
    assert kept == [
        {"because": ["abandoned branch", "pinned"], "step": 2},
        {"because": ["abandoned branch"], "step": 3},
        {"because": ["newest", "last 1"], "step": 5},
    ]
    result = cli.json("gc", tmp_path, "--keep-last", 1, "--abandoned")
    assert [row["step"] for row in result["removed"]] == [3]
    assert Checkpointer(tmp_path).steps() == (2, 5)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    for step in (100, 200, 300, 400):
        save(root, step, parity=step == 200, format="torch_dist" if step == 300 else None)
    return root


@pytest.mark.parametrize("seed", range(few(24, of=200)))
def test_the_newest_good_step_is_right_after_random_damage(
    template: Path, tmp_path: Path, cli: CommandLine, seed: int
) -> None:
    choice, root = random.Random(seed), tmp_path / "run"
    shutil.copytree(template, root)
    damaged = choice.sample((100, 200, 300, 400), choice.randint(1, 4))
    done = []
    for step in damaged:
        directory = root / f"iter_{step:07d}"
        path = choice.choice(sorted(p for p in directory.rglob("*") if p.is_file()))
        kind = choice.choice(["flip", "cut", "remove", "uncommit"])
        # No digest covers all of a commit, and of the note that has its place in torch_dist.
        if kind == "uncommit" or path.name == "metadata.json" or path.match("megackpt-*.json"):
            (directory / "metadata.json").unlink()
        elif kind == "remove":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(path.read_bytes()[: choice.randrange(path.stat().st_size)])
        else:
            flip(path, choice.randrange(path.stat().st_size))
        done.append((step, path.name, kind))
    good = max({100, 200, 300, 400} - set(damaged), default=None)
    result = cli.json("verify", root, "--all", "--deep", code=None)
    assert result["newest_good"] == good, (done, result["steps"])
