"""Tables of long keys: they wrap where a person would, and can be copied."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.cli import main

KEYS = [
    "chained_0.optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "short",
    "x" * 150 + ".tail",
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in KEYS}
    megackpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_on_a_terminal_keys_wrap_at_dots_and_follow_in_full(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["inspect", str(checkpoint)]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = out.splitlines()
    in_full = [line.rstrip() for line in lines if line.rstrip() in KEYS]
    assert in_full == sorted([KEYS[0], KEYS[2]])
    assert all(len(line.rstrip()) <= 80 for line in lines if line.rstrip() not in KEYS)
    parts = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    first = parts.index(next(part for part in parts if part.startswith("chained_0.")))
    wrapped = parts[first : first + 8]
    while "".join(wrapped) != KEYS[0]:
        wrapped.pop()
    assert len(wrapped) > 1
    assert all(part.endswith(".") for part in wrapped[:-1])


def test_in_a_pipe_each_row_is_a_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for key in KEYS:
        assert len([line for line in lines if f" {key} " in line]) == 1
