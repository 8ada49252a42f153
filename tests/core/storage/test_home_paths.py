"""`~` is the home directory wherever a path can be given, as in a shell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import Checkpointer, LoadOptions, LocalTier, ShardedTensor, StorageError
from megackpt.cli import main
from megackpt.storage import LocalStore, open_store

STATE = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}


def empty() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the home directory; the working directory is another, empty one."""
    there, here = tmp_path / "home", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(there))
    monkeypatch.chdir(here)
    yield there
    assert os.listdir(here) == []  # nothing was made in a directory called ~


@pytest.mark.parametrize("kind", [str, Path])
def test_save_and_load_find_the_home_directory(home: Path, kind: type) -> None:
    megackpt.save(STATE, kind("~/a"))
    assert (home / "a" / "metadata.json").is_file()
    assert torch.equal(megackpt.load(empty(), kind("~/a"))["w"], torch.ones(2))
    assert LocalStore("~/a").location == open_store(kind("~/a")).location == str(home / "a")


def test_a_checkpointer_its_tiers_and_its_copies_find_the_home_directory(home: Path) -> None:
    with Checkpointer("~/run", tiers=[LocalTier("~/tier", replication_factor=1)]) as checkpointer:
        assert checkpointer.root == home / "run"
        checkpointer.save(1, STATE)
    assert (home / "run" / "iter_0000001" / "metadata.json").is_file()
    assert (home / "tier" / "iter_0000001" / "metadata.json").is_file()
    data = next((home / "run" / "iter_0000001" / "data").iterdir())
    shutil.copytree(home / "run" / "iter_0000001", home / "other" / "iter_0000001")
    data.unlink()
    options = LoadOptions(on_corrupt="fallback", copies=("~/other",))
    loaded = Checkpointer("~/run", load_options=options).load(empty(), 1)
    assert torch.equal(loaded["w"], torch.ones(2))


def test_commands_find_the_home_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, STATE)
    for command in ("ls ~/run", "pin ~/run 1", "gc ~/run --keep-all"):
        assert main(command.split()) == 0
    for command in ("verify {}", "inspect {}", "diff {0} {0}", "repair {}", "convert {} ~/new --to zarr"):
        assert main(command.format("~/run/iter_0000001").split()) == 0
    assert (home / "new" / "metadata.json").is_file()
    assert main(["plan", "~/run/iter_0000001", "--json"]) == 0
    assert main(["plan", "gpt-125m", "--from", "tp1", "--chart=~/plan.svg"]) == 0
    assert (home / "plan.svg").is_file()
    capsys.readouterr()


def test_a_file_where_a_directory_is_needed_is_named_and_nobody_else_is_blamed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below" / "it"):
        for use in (
            lambda path=path: megackpt.save(STATE, path),
            lambda path=path: megackpt.load(STATE, path),
            lambda path=path: Checkpointer(path).save(1, STATE),
            lambda path=path: Checkpointer(path).load(STATE),
            lambda path=path: Checkpointer(path).steps(),
        ):
            with pytest.raises(StorageError, match="ENOTDIR") as caught:
                use()
            assert f"{file} is a file where a directory is needed" in str(caught.value)
            assert "another process" not in str(caught.value)
    assert file.read_text() == "x"
