"""`megackpt demo`: four ranks save, three load, and the picture says who has what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.cli import main
from megackpt.cli.entry import BAD_INPUT, FAILED_CHECK


def demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["demo", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_numbers_are_the_ranks_of_the_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    result = demo(capsys)
    assert result["equal"]
    assert result["saved"]["weight"] == [[0] * 12] * 3 + [[2] * 12] * 3
    of_tp_0 = [0] * 22 + [1] * 14  # the cut of the flat range lies within the second row
    of_tp_1 = [rank + 2 for rank in of_tp_0]
    assert [rank for row in result["saved"]["exp_avg"] for rank in row] == of_tp_0 + of_tp_1
    assert result["loaded"] == {key: [[0] * 4 + [1] * 4 + [2] * 4] * 6 for key in ("weight", "exp_avg")}


def test_the_kept_checkpoint_is_a_real_one_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "demo"
    files = demo(capsys, "--dir", str(directory))["files"]
    assert {name: (directory / name).stat().st_size for name in files} == files
    assert {key: tuple(t.global_shape) for key, t in megackpt.load_tensors_metadata(directory).items()} == {
        "weight": (6, 12),
        "exp_avg": (6, 12),
    }
    assert main(["demo", "--dir", str(directory)]) == BAD_INPUT
    assert "is not empty" in capsys.readouterr().err


def test_the_picture_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("equals what was saved" in line for line in lines)


def test_a_wrong_load_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = megackpt.load

    def load_all_but_one_element(state: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(state, *args, **kwargs)
        assert isinstance(state["weight"].data, torch.Tensor)
        state["weight"].data[0, 0] += 1
        return loaded

    monkeypatch.setattr(megackpt, "load", load_all_but_one_element)
    assert main(["demo"]) == FAILED_CHECK
    assert "DIFFERS" in capsys.readouterr().out
