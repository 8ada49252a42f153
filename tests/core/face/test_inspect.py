"""`megackpt inspect`: what is in a checkpoint, without reading tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.cli import main
from tests.support.checkpoints import FORMATS, RANKS, flip, saved


def inspected(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["inspect", str(directory), "--json", *flags]) == 0
    message: dict[str, Any] = json.loads(capsys.readouterr().out)
    return message


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_objects_files_and_common_state_of_any_format_are_listed(
    tmp_path: Path, format: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    message = inspected(saved(tmp_path, format), capsys)
    assert (message["backend"], message["version"]) == format
    shown = {a["key"]: (a["dtype"], a["shape"]) for a in message["arrays"]}
    assert shown == {
        "block": ("float32", [6, 8]),
        "flat": ("float32", [6, 8]),
        "half": ("bfloat16", [3]),
        "long": ("float32", [400_000]),
        "object": ("object", [RANKS]),
    }
    assert {a["key"]: a["chunks"] for a in message["arrays"]}["object"] == RANKS
    assert message["common"]["args.betas[1]"] == "0.95"
    assert message["common"]["rng"] == "torch.int64 [4]: 0, 1, 2, 3"
    assert message["content"] == {"sharding": "'flat'"}
    nbytes = sum(a["nbytes"] for a in message["arrays"])
    assert sum(f["nbytes"] for f in message["files"]) == nbytes
    assert all((tmp_path / f["name"]).is_file() for f in message["files"])
    if format[0] != "zarr":
        assert set(message["rank_nbytes"]) == {"0", "1"}
        assert sum(message["rank_nbytes"].values()) == nbytes


def test_globs_choose_keys_and_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = inspected(saved(tmp_path), capsys, "--keys", "b*", "--keys", "half")
    assert [a["key"] for a in message["arrays"]] == ["block", "half"]
    assert sum(f["chunks"] for f in message["files"]) == 3
    assert sum(f["nbytes"] for f in message["files"]) == 48 * 4 + 6


def test_tensors_are_not_read_and_damage_of_common_state_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in sorted((saved(tmp_path) / "data").iterdir()):
        file.unlink()
    (common,) = tmp_path.glob("common-*.json")
    flip(common, 10)
    message = inspected(tmp_path, capsys)
    assert len(message["arrays"]) == 5
    assert common.name in message["common_error"]


def test_tables_show_what_a_person_looks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved(tmp_path)), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    for text in (
        "megackpt version 1",
        "saved by 2 ranks",
        "4 arrays, the first 2",
        "[6, 8]",
        "bytes by rank",
    ):
        assert text in out
    assert "long" not in out


def test_keys_are_printed_as_they_are_and_move_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "a[bold]\x1b[2Jb :smile:"
    megackpt.save({"w": ShardedTensor.from_rank_offsets(key, torch.zeros(1))}, tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a[bold]\\x1b[2Jb :smile:" in out
    assert "\x1b" not in out


def test_bad_usage_and_a_missing_checkpoint_have_different_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect"]) == 2
    assert main(["inspect", str(tmp_path)]) == 3
    assert "is not a checkpoint" in capsys.readouterr().err
    (index,) = saved(tmp_path).glob("index-*")
    flip(index, -1)
    assert main(["inspect", str(tmp_path)]) == 1
    (tmp_path / "metadata.json").write_text("[]")
    assert main(["inspect", str(tmp_path)]) == 3
    assert main(["inspect", "-h"]) == 0
    assert "Exit codes: 0 done" in " ".join(capsys.readouterr().out.split())
