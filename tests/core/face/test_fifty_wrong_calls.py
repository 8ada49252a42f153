"""Wrong calls: an error without a traceback, with the cause and the next step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
    ("init ddp file/train.py", "give another path"),
    ("init megatron megatron.py", "would hide megatron, which the script imports"),
    ("nosuch", "There are bench, convert, "),
    ("ls folder", "it is a folder of Hugging Face. Look into it with"),
    ("ls orbax", "it is a checkpoint of Orbax. It is not read. Restore it with Orbax"),
    ("ls hdfs://host/run", "Mount the location as a directory"),
    ("inspect orbax", "Restore it with Orbax"),
    ("verify orbax", "Restore it with Orbax"),
    ("diff run/iter_0000001 orbax", "Restore it with Orbax"),
    ("convert orbax out --to zarr", "Restore it with Orbax"),
    ("repair orbax", "Restore it with Orbax"),
    ("gc orbax --keep-all", "it is a checkpoint of Orbax. It is not read. Restore it with Orbax"),
    ("gc folder --keep-last 1", "it is a folder of Hugging Face. Look into it with"),
    ("gc run/iter_0000001 --keep-all", "name the directory above it"),
    ("pin folder 1", "Name the directory that a Checkpointer saves to"),
    ("pin run x", "not a valid integer"),
    ("rollback empty 1 --yes", "Name the directory that a Checkpointer saves to"),
    ("rollback run/iter_0000001 1 --yes", "name the directory above it"),
    ("repair run/iter_0000001 --from nowhere", "Check the path"),
    ("convert folder out --to=", "Known are megackpt version 1"),
    ("convert folder file --to zarr", "Name a directory that is new"),
    ("convert run/iter_0000001 out --to hf", "Give config="),
    ("convert run/iter_0000001 out --to hf --config file", "give another path"),
    ("convert run/iter_0000001 out --to hf --config list.json", "the config.json of a model, or a folder"),
    ("maps show llama --config list.json", "Give the config.json of a model"),
    ("maps show llama --config empty", "or the folder that has it"),
    ("plan list.json --from tp2", "Give the fields of ModelSizes"),
    ("plan gpt-125m --from tp0", "at least 1"),
    ("plan folder --from tp2", "Leave it out"),
    ("bench --dir file --cases save", "is a file"),
    ("bench --dir new --size 0 --cases save", "give at least 1 MiB"),
    ("bench --dir new --ranks 3 --cases save", "give 1 or an even number"),
    ("demo --dir file", "is a file"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            tensor = ShardedTensor.from_rank_offsets("weight", torch.ones(4))
            checkpointer.save(step, {"weight": tensor}, metrics={"loss": 1.0})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "manifest.ocdbt").write_text("")
    (tmp_path / "folder").mkdir()
    save_file({"weight": torch.ones(4)}, tmp_path / "folder" / "model.safetensors")
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
    if "--json" not in words:
        assert "error" in json.loads(cli.run(*words.split(), "--json", code=None)[0])
