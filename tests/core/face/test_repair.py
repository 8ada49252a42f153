"""`megackpt repair`: damaged files are repaired from parity or copies, or nothing is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import megackpt
from megackpt import SaveOptions
from megackpt.cli import main
from megackpt.comm import Group
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import FORMATS, RANKS, copy_of_saved, files_below, flip, saved, state_of
from tests.support.dcp_alone import ALONE

RunCommand = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def repair(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    def run(directory: Path, *flags: str) -> tuple[int, dict[str, Any]]:
        code = main(["repair", str(directory), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def protected(directory: Path) -> Path:
    """Save the small state with one parity file over the data files of both ranks."""

    def save_rank(group: Group) -> None:
        megackpt.save(
            state_of(group.rank),
            directory,
            options=SaveOptions(parity=2, plain_tensors="common"),
            group=group,
        )

    SimulatedWorld(RANKS).run(save_rank)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in files_below(directory, "*")}


def lose(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def spoil_block(file: Path) -> None:
    flip(file, -1)


def spoil_header(file: Path) -> None:
    flip(file, 20)


DAMAGES = [lose, cut, grow, spoil_block, spoil_header]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("pattern", ["data/*-00000*", "data/*-00001*", "parity/*"])
def test_parity_repairs_any_damage_to_one_file(
    tmp_path: Path, pattern: str, damage: Callable[[Path], None], repair: RunCommand
) -> None:
    before = content(protected(tmp_path))
    (file,) = tmp_path.glob(pattern)
    damage(file)
    code, message = repair(tmp_path)
    assert (code, message["is_applied"], message["is_whole"]) == (0, True, True)
    assert [(f["file"], f["source"]) for f in message["files"]] == [
        (str(file.relative_to(tmp_path)), "parity")
    ]
    assert content(tmp_path) == before


def test_files_of_one_group_that_are_damaged_at_different_positions_are_repaired(
    tmp_path: Path, repair: RunCommand
) -> None:
    before = content(protected(tmp_path))
    first, second = files_below(tmp_path, "data/*")
    flip(first, 5000)
    flip(second, -1)
    code, message = repair(tmp_path)
    assert code == 0
    assert len(message["files"]) == 2
    assert all(stop - start < f["nbytes"] for f in message["files"] for start, stop in f["ranges"])
    assert content(tmp_path) == before


def test_nothing_is_changed_if_something_cannot_be_repaired(tmp_path: Path, repair: RunCommand) -> None:
    whole = content(protected(tmp_path))
    first, second = files_below(tmp_path, "data/*")
    flip(first, -1)
    (index,) = tmp_path.glob("common-*.json")
    flip(index, 5)
    before = content(tmp_path)
    code, message = repair(tmp_path)
    assert (code, message["is_applied"], message["is_whole"]) == (1, False, False)
    assert [f["file"] for f in message["files"]] == [f"data/{first.name}"]
    assert content(tmp_path) == before
    code, message = repair(tmp_path, "--partial")
    assert (code, message["is_applied"], message["is_whole"]) == (1, True, False)
    assert content(tmp_path) == {**whole, index.name: before[index.name]}
    assert second.read_bytes() == whole[f"data/{second.name}"]


def test_dry_run_shows_what_can_be_repaired_and_changes_nothing(tmp_path: Path, repair: RunCommand) -> None:
    lose(files_below(protected(tmp_path), "data/*")[0])
    before = content(tmp_path)
    code, message = repair(tmp_path, "--dry-run")
    assert (code, message["is_applied"], message["is_whole"]) == (0, False, True)
    assert len(message["files"]) == 1
    assert content(tmp_path) == before


def test_a_whole_checkpoint_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(protected(tmp_path))
    assert main(["repair", str(tmp_path)]) == 0
    assert "no damage found; nothing was changed" in capsys.readouterr().out
    assert content(tmp_path) == before


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_copy_repairs_all_files_of_chunks_that_are_lost(
    tmp_path: Path, format: tuple[str, int], repair: RunCommand
) -> None:
    directory, copy = copy_of_saved(tmp_path / "it", format), tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = content(directory)
    for file in megackpt.inspect(directory).files:
        lose(directory / file.name)
    assert repair(directory, "--from", str(copy))[0] == 0
    assert content(directory) == before


@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_repairs_every_other_file_of_a_checkpoint(
    tmp_path: Path, first: int, repair: RunCommand
) -> None:
    directory, copy = protected(tmp_path / "it"), tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = content(directory)
    for name in sorted(before)[first::2]:
        lose(directory / name)
    assert repair(directory, "--from", str(copy))[0] == 0
    assert content(directory) == before


@pytest.mark.parametrize("at", range(5, 860, 57))
def test_a_damaged_commit_is_repaired_from_a_copy(tmp_path: Path, at: int, repair: RunCommand) -> None:
    """Also where it says that other files are damaged, and they are not."""
    directory = protected(tmp_path / "it")
    shutil.copytree(directory, tmp_path / "copy")
    before = content(directory)
    flip(directory / "metadata.json", at)
    flip(files_below(directory, "data/*")[0], -1)
    code, message = repair(directory, "--from", str(tmp_path / "copy"))
    assert code == 0, message["remaining"]
    assert json.loads(content(directory)["metadata.json"]) == json.loads(before["metadata.json"])
    assert main(["verify", str(directory), "--deep"]) == 0


def test_a_copy_of_another_save_is_not_used(tmp_path: Path, repair: RunCommand) -> None:
    directory, other = saved(tmp_path / "it"), saved(tmp_path / "other")
    flip(files_below(directory, "data/*")[0], -1)
    before = content(directory)
    code, message = repair(directory, "--from", str(other))
    assert code == 1
    assert message["unusable_sources"] == [
        f"{other} has another save, or its format does not record which save it is"
    ]
    assert content(directory) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_another_library_has_saved_is_not_mixed_with_a_copy(tmp_path: Path, repair: RunCommand) -> None:
    """Nothing in it says which save it is of: a copy could be of another step."""
    for location, value in (("it", 1.0), ("other", 2.0)):
        torch.distributed.checkpoint.save(
            {"w": torch.full((4,), value)}, checkpoint_id=tmp_path / location, **ALONE
        )
    lose(tmp_path / "it/__0_0.distcp")
    shutil.copy(tmp_path / "it/.metadata", tmp_path / "other/.metadata")  # as older releases would write it
    code, message = repair(tmp_path / "it", "--from", str(tmp_path / "other"))
    assert (code, message["is_applied"], message["files"]) == (1, False, [])


def test_what_a_repair_that_was_killed_left_is_removed(tmp_path: Path, repair: RunCommand) -> None:
    before = content(protected(tmp_path))
    first = files_below(tmp_path, "data/*")[0]
    lose(first)
    (tmp_path / f"data/.{first.name}.0123456789abcdef.tmp").write_bytes(b"half")
    assert repair(tmp_path)[0] == 0
    assert content(tmp_path) == before


def test_tables_show_what_was_repaired_and_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = files_below(protected(tmp_path), "data/*")
    lose(first)
    assert main(["repair", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "parity" in out
    assert "1 files were repaired" in out
    lose(first)
    lose(second)
    assert main(["repair", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "nothing can be repaired" in out
    assert "missing" in out
