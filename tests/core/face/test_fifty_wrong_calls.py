"""Wrong calls: an error without a traceback, with the cause and the next step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megackpt import Checkpointer, ShardedTensor
from tests.support.command_line import CommandLine

CALLS = [
    ("lst run", "Did you mean"),
    ("verfy run", "Did you mean verify"),
    ("rolback run 1", "Did you mean rollback"),
    ("ls nowhere", "Name the one that a Checkpointer saves to"),
    ("ls run/iter_0000001", "Look into it with `megackpt inspect`"),
    ("ls file", "Name the one"),
    ("ls run --follow --json", "--follow prints lines until"),
    ("ls run --tail", "No such option"),
    ("inspect nowhere", "Check the path; `megackpt ls ROOT`"),
    ("inspect file", "Name the directory"),
    ("inspect empty", "Give the directory of a finished save"),
    ("inspect run --keys nothing", "Leave --keys out"),
    ("inspect run --keys weigt", "Did you mean 'weight'?"),
    ("inspect run --limit -1", "x>=0"),
    ("inspect", "Missing argument"),
    ("verify nowhere", "Check the path"),
    ("verify run --threads 0", "No such option"),
    ("verify run --depp", "Did you mean"),
    ("verify nowhere --all", "Name the one that a Checkpointer saves to"),
    ("verify run/iter_0000001 --all", "name the directory above it"),
    ("verify empty --all", "Name the directory that a Checkpointer saves to"),
    ("rollback run", "Missing argument"),
    ("rollback run 7", "Name one of the committed steps"),
    ("rollback run one", "not a valid integer"),
    ("rollback run 1", "give --yes"),
    ("rollback nowhere 1 --yes", "Name the one"),
    ("gc run", "Give the steps to keep"),
    ("gc run --keep-last 0", "x>=1"),
    ("gc run --keep-all --keep-last 1", "Give the steps to keep"),
    ("gc run --keep-best acc", "known are"),
    ("gc run --keep-best acc:x", "give it as loss"),
    ("gc empty --keep-last 1", "Name the directory that a Checkpointer saves to"),
    ("gc run --keep-last 1 --min-age -1", "min-age"),
    ("pin run 9", "Pin one of the committed steps"),
    ("pin run --list", "No such option"),
    ("pin run --remove", "--remove needs the STEP"),
    ("diff run", "Missing argument"),
    ("diff run nowhere", "Check the path"),
    ("convert run out", "Name the new format"),
    ("convert run out --to torchdist", "Did you mean 'torch_dist'?"),
    ("convert run out --to zar", "Did you mean 'zarr'?"),
    ("convert run out --to zarr:x", "give a number, as in zarr:3"),
    ("convert run run --to zarr", "Name a directory that is new"),
    ("convert nowhere out --to zarr", "Check the path"),
    ("convert run out --to zarr --dtype bf16", "convert --help"),
    ("repair run", "Name a step of it"),
    ("plan llama3-80b --from tp1", "Did you mean 'llama3-8b'?"),
    ("plan gpt-125m", "give the layout"),
    ("plan gpt-125m --from tq8", "tq8"),
    ("maps show llamma --config config.json", "Did you mean 'llama'?"),
    ("maps show", "Missing option"),
    ("init ddpp", "Choose from|is not one of"),
    ("init", "Missing argument"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            tensor = ShardedTensor.from_rank_offsets("weight", torch.ones(4))
            checkpointer.save(step, {"weight": tensor}, metrics={"loss": 1.0})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "next_step"), CALLS, ids=[words for words, _ in CALLS])
@pytest.mark.usefixtures("here")
def test_a_wrong_call_names_its_cause_and_the_next_step(words: str, next_step: str, cli: CommandLine) -> None:
    out, err = cli.run(*words.split(), code=None)
    text = " ".join(f"{out} {err}".split())
    assert err
    assert "Traceback" not in text
    assert re.search(next_step, text) or next_step in text, text
