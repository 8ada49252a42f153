"""What a user mistypes: one clear line on stderr, the exit code of docs/operating.md, no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megackpt
from megackpt import Checkpointer
from megackpt.cli import main
from megackpt.cli.entry import BAD_INPUT, UNREADABLE
from tests.support.command_line import CommandLine
from tests.support.effort import sampled


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints, a run, files, an empty directory, and folders of others."""
    tmp_path = tmp_path_factory.mktemp("made")
    weight = torch.ones(4)
    megackpt.save({"weight": weight}, tmp_path / "whole")
    for name, text in {"file": "text", "list.json": "[1]", "config.json": '{"model_type": "llama"}'}.items():
        (tmp_path / name).write_text(text)
    for name in ("empty", "orbax", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "orbax" / "manifest.ocdbt").write_text("")
    save_file({"weight": weight}, tmp_path / "folder" / "model.safetensors")
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"weight": weight}, metrics={"loss": 1.0})
        checkpointer.save(2, {"weight": weight}, metrics={"loss": 0.5})
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    for index in (tmp_path / "damaged").glob("index*"):
        index.write_bytes(bytes(index.stat().st_size))
    shutil.copytree(tmp_path / "whole", tmp_path / "no-json")
    (tmp_path / "no-json" / "metadata.json").write_text("{")
    return tmp_path


@pytest.fixture
def here(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory; there is no S3 server."""
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    return tmp_path


@pytest.mark.parametrize("location", ["file", "empty", "nowhere"])
@pytest.mark.parametrize(
    "command", ["inspect {}", "verify {}", "repair {}", "diff whole {}", "convert {} new --to zarr"]
)
def test_a_location_without_a_checkpoint_has_exit_code_3_in_every_command(
    here: Path, command: str, location: str, cli: CommandLine
) -> None:
    out, message = cli.run(*command.format(location).split(), code=3)
    assert out == ""
    assert location in message
    assert ("is a file, not a checkpoint" if location == "file" else "is not a checkpoint") in message


@pytest.mark.parametrize("location", ["file", "nowhere"])
@pytest.mark.parametrize("command", ["ls {}", "pin {}", "pin {} 1", "pin {} 1 --remove", "gc {} --keep-all"])
def test_a_root_that_is_not_a_directory_has_exit_code_3_in_every_command(
    here: Path, command: str, location: str, cli: CommandLine
) -> None:
    message = f"megackpt: {location} is not a directory. Name the one that a Checkpointer saves to.\n"
    assert cli.run(*command.format(location).split(), code=3) == ("", message)


@pytest.mark.parametrize(
    ("command", "endpoint", "message"),
    [
        ("verify s3://bucket/run", "http://127.0.0.1:9", "no connection"),
        ("verify s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("ls s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("repair s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("pin s3://bucket/run", "nowhere", "must begin with http:// or https://"),
    ],
)
def test_a_store_that_cannot_be_reached_is_bad_input_and_not_damage(
    here: Path, command: str, endpoint: str, message: str,
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine,
) -> None:  # fmt: skip
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    out, err = cli.run(*command.split(), code=2)
    assert out == ""
    assert message in err


LOCATIONS = ("nowhere", "file", "empty", "whole", "run", "run/iter_9", "damaged", "no-json", "s3://bucket/x")
"""What commands are pointed at: nothing, a file, ..., damage in the index, in the commit, and a URL."""

CODES_BY_LOCATION = {
    "inspect {}": (3, 3, 3, 0, 0, 3, 1, 3, 2),
    "verify {}": (3, 3, 3, 0, 0, 3, 1, 1, 2),
    "repair {}": (3, 3, 3, 0, 3, 3, 1, 1, 2),
    "repair whole --from {}": (3, 3, 0, 0, 3, 3, 0, 0, 2),
    "diff whole {}": (3, 3, 3, 0, 0, 3, 1, 3, 2),
    "convert {} new --to megackpt": (3, 3, 3, 0, 0, 3, 1, 3, 2),
    "convert {} new --to huggingface": (3, 3, 3, 2, 2, 3, 1, 3, 2),
    "convert {} new --from huggingface": (3, 3, 3, 2, 3, 3, 1, 3, 2),
    "convert whole {} --to megackpt": (0, 2, 0, 2, 2, 0, 2, 2, 2),
    "ls {}": (3, 3, 0, 3, 0, 3, 3, 3, 2),
    "pin {} 1": (3, 3, 3, 3, 0, 3, 3, 3, 2),
    "pin {}": (3, 3, 0, 3, 0, 3, 3, 3, 2),
    "gc {} --keep-last 1": (3, 3, 3, 3, 0, 3, 3, 3, 2),
    "plan {} --to tp1": (2, 2, 3, 2, 2, 2, 1, 3, 2),
    "demo --dir {}": (0, 2, 0, 2, 2, 0, 2, 2, 2),
    "maps show --config {}": (2, 2, 2, 2, 2, 2, 1, 3, 2),
    "bench --cases foo --dir {}": (2, 2, 2, 2, 2, 2, 2, 2, 2),
}
NEXT_STEP = re.compile(
    r"\b(Name|Give|Check|Install it|Look|Leave|Pin|Known are|Models are|Did you mean|load another|Try)\b"
)
"""How errors tell how to go on."""


@sampled(3)
@pytest.mark.parametrize("command", CODES_BY_LOCATION)
def test_every_command_explains_every_wrong_location(
    here: Path, command: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for location, code in zip(LOCATIONS, CODES_BY_LOCATION[command], strict=True):
        arguments = command.format(location).split()
        out, err = cli.run(*arguments, code=code)
        assert "Traceback" not in err
        for name in ("new", "nowhere", "run/iter_9"):  # the next location is wrong again
            shutil.rmtree(name, ignore_errors=True)
        shutil.rmtree("empty")
        Path("empty").mkdir()
        if code == 0:
            continue
        text = " ".join((err + out).split())
        assert NEXT_STEP.search(text), (arguments, text)
        if "foo" not in command:
            assert location.removeprefix("s3://") in text or "megackpt[s3]" in text, (arguments, text)


@contextmanager
def without_rights() -> Iterator[None]:
    """Give up the rights of root for a block of code."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@pytest.mark.parametrize("command", ["inspect {}", "verify {}", "diff {0} {0}", "ls {}", "pin {}"])
def test_a_directory_without_permission_is_bad_input(here: Path, command: str, cli: CommandLine) -> None:
    shutil.copytree("run", "closed/run")
    main(command.format("run").split())  # modules that it imports may be out of reach below
    Path("closed").chmod(0)
    try:
        with without_rights():
            out, message = cli.run(*command.format("closed/run").split(), code=2)
    finally:
        Path("closed").chmod(0o755)
    assert out == ""
    assert "closed/run: cannot use: Permission denied" in message
    assert "check the owner and mode" in message


@pytest.mark.parametrize("command", ["verify whole", "verify whole --deep", "repair whole"])
@pytest.mark.parametrize("closed", ["data", "data/*", "index*"])
def test_a_file_without_permission_is_bad_input_and_not_damage(
    here: Path, command: str, closed: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(command.split())  # modules that it imports may be out of reach below
    with tempfile.TemporaryDirectory() as open_to_all:  # tmp_path is not, and would be the first error
        Path(open_to_all).chmod(0o755)
        shutil.copytree("whole", f"{open_to_all}/whole")
        monkeypatch.chdir(open_to_all)
        for path in Path("whole").glob(closed):
            path.chmod(0)
        with without_rights():
            assert "Permission denied" in cli.err(*command.split(), code=2)
        monkeypatch.chdir(here)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("inspect run/iter_0000001", "lists all files that a checkpoint lacks"),
        ("diff run/iter_0000001 whole", "lists all files that a checkpoint lacks"),
        ("rollback run 1 --yes", "so a restart could not load it"),
    ],
)
def test_a_step_that_has_lost_a_file_is_damaged_in_every_command(
    here: Path, command: str, text: str, cli: CommandLine
) -> None:
    next(here.glob("run/iter_0000001/index*")).unlink()
    assert text in cli.err(*command.split(), code=1)
    assert Path("run/iter_0000002").is_dir()


WRONG_CALLS = {
    BAD_INPUT: [
        ("plan llama3-8b --from foo", "'foo' is not an axis with its size. Write one as tp8,pp16,dp128"),
        ("plan llama3-8b --from tp8,tp4", "it names an axis twice. Write one as tp8,pp16,dp128"),
        ("bench --dir new --cases foo", "'foo' is no case. Known are save"),
        ("bench --dir new --chart nowhere/x.svg", "nowhere/x.svg: no chart can be drawn there"),
        ("bench --dir new --chart chart.txt", "chart.txt: no chart can be drawn there"),
        ("bench --dir new --size 999999999T --cases save", "bytes, and new has"),
        ("plan gpt-125m --from tp2 --ranks-per-node 99999999999999999999", "ranks_per_node is 9999"),
        ("diff whole whole --keys b*", "No key of whole or whole matches 'b*'"),
        ("ls http://host/run", "there is no store for http:// locations"),
        ("verify s3://", "not a URL of an object store"),
        ("convert whole new --to nosuch", "No strategy saves format 'nosuch'. Known are megackpt version 1"),
        ("gc run --keep-all --min-age nan", "--min-age is nan; give a finite number of at least 0"),
        ("pin run 99999999999999999999999", "step is 99999999999999999999999; steps are counted from 0"),
        ("gc run --keep-best lost", "no committed step of run was saved with that metric; known are loss"),
        ("verfy whole", "There is no command 'verfy'. Did you mean verify?"),
        ("maps shwo", "No such command 'shwo'"),
        ("convert whole new --to zarr --map llama", "--map cannot be used with these formats"),
        ("convert whole new --to huggingface --map llama", "Give config= (or --config)"),
        ("maps show nosuch --config file", "file cannot be read"),
        ("inspect whole --keys b*", "No key of whole matches 'b*'"),
        ("inspect whole --limit x", "'x' is not a valid integer"),
        ("gc run", "Give the steps to keep"),
        ("lst run", "Did you mean"),
        ("rm run", "Did you mean gc"),
        ("diff run run --keys nothing", "Leave --keys out to compare all"),
        ("convert run out --to megackpt:2", "huggingface version 1."),
        ("version", "Did you mean --version"),
        ("rolback run 1", "Did you mean rollback"),
        ("ls run --follow --json", "--follow prints lines until"),
        ("ls run --tail", "No such option"),
        ("inspect run --keys nothing", "Leave --keys out"),
        ("inspect run --keys weigt", "Did you mean 'weight'?"),
        ("inspect run --limit -1", "-1 is not in the range x>=0"),
        ("inspect", "Missing argument 'PATH'"),
        ("verify run --threads 0", "No such option"),
        ("verify run --depp", "Did you mean"),
        ("rollback run", "Missing argument"),
        ("rollback run one", "not a valid integer"),
        ("rollback run 1", "give --yes"),
        ("gc run --keep-last 0", "x>=1"),
        ("gc run --keep-all --keep-last 1", "Give the steps to keep"),
        ("gc run --keep-best acc:x", "give it as loss"),
        ("gc run --keep-last 1 --min-age -1", "min-age"),
        ("pin run --list", "No such option"),
        ("pin run --remove", "--remove needs the STEP"),
        ("diff run", "Missing argument"),
        ("convert run out", "Name the new format"),
        ("convert run out --to torchdist", "Did you mean 'torch_dist'?"),
        ("convert run out --to zar", "Did you mean 'zarr'?"),
        ("convert run out --to zarr:x", "'x' is not a version; give a number, as in zarr:3"),
        ("convert run run --to zarr", "Name a directory that is new"),
        ("convert run out --to zarr --dtype bf16", "convert --help"),
        ("plan llama3-80b --from tp1", "Did you mean 'llama3-8b'?"),
        ("plan gpt-125m", "give the layout"),
        ("maps show llamma --config config.json", "Did you mean 'llama'?"),
        ("maps show", "Missing option"),
        ("init ddpp", "Choose from|is not one of"),
        ("init", "Missing argument"),
        ("init ddp file/train.py", "give another path"),
        ("init megatron megatron.py", "would hide megatron, which the script imports"),
        ("nosuch", "There are bench, convert, "),
        ("ls hdfs://host/run", "Mount the location as a directory"),
        ("pin run x", "not a valid integer"),
        ("convert folder out --to=", "Known are megackpt version 1"),
        ("convert folder file --to zarr", "Name a directory that is new"),
        ("convert run/iter_0000001 out --to hf", "Give config="),
        ("convert run/iter_0000001 out --to hf --config file", "give another path"),
        (
            "convert run/iter_0000001 out --to hf --config list.json",
            "the config.json of a model",
        ),
        ("maps show llama --config list.json", "Give the config.json of a model"),
        ("maps show llama --config empty", "or the folder that has it"),
        ("plan list.json --from tp2", "Give the fields of ModelSizes"),
        ("plan gpt-125m --from tp0", "at least 1"),
        ("plan folder --from tp2", "Leave it out"),
        ("bench --dir file --cases save", "is a file"),
        ("bench --dir new --size 0 --cases save", "give at least 1 MiB"),
        ("bench --dir new --ranks 3 --cases save", "give 1 or an even number"),
        ("demo --dir file", "is a file"),
    ],
    UNREADABLE: [
        ("pin run 7", "Pin one of the committed steps: 1, 2."),
        ("ls nowhere", "Name the one that a Checkpointer saves to"),
        ("ls run/iter_0000001", "Look into it with `megackpt inspect`"),
        ("ls file", "Name the one"),
        ("inspect nowhere", "Check the path; `megackpt ls ROOT`"),
        ("inspect run/2", "Did you mean run/iter_0000002?"),
        ("inspect file", "Name the directory"),
        ("inspect empty", "Give the directory of a finished save"),
        ("verify nowhere", "Check the path"),
        ("verify nowhere --all", "Name the one that a Checkpointer saves to"),
        ("verify run/iter_0000001 --all", "name the directory above it"),
        ("verify empty --all", "Name the directory that a Checkpointer saves to"),
        ("rollback run 7", "Name one of the committed steps"),
        ("rollback nowhere 1 --yes", "Name the one"),
        ("gc empty --keep-last 1", "Name the directory that a Checkpointer saves to"),
        ("diff run nowhere", "Check the path"),
        ("convert nowhere out --to zarr", "Check the path"),
        ("repair run", "Name a step of it"),
        ("ls folder", "it is a folder of Hugging Face. Look into it with"),
        ("ls orbax", "it is a checkpoint of Orbax. It is not read. Restore it with Orbax"),
        ("inspect orbax", "Restore it with Orbax"),
        ("verify orbax", "Restore it with Orbax"),
        ("diff run/iter_0000001 orbax", "Restore it with Orbax"),
        ("convert orbax out --to zarr", "Restore it with Orbax"),
        ("repair orbax", "Restore it with Orbax"),
        ("gc orbax --keep-all", "it is a checkpoint of Orbax. It is not read. Restore it with Orbax"),
        ("gc folder --keep-last 1", "it is a folder of Hugging Face. Look into it with"),
        ("gc run/iter_0000001 --keep-all", "name the directory above it"),
        ("pin folder 1", "Name the directory that a Checkpointer saves to"),
        ("rollback empty 1 --yes", "Name the directory that a Checkpointer saves to"),
        ("rollback run/iter_0000001 1 --yes", "name the directory above it"),
        ("repair run/iter_0000001 --from nowhere", "Check the path"),
    ],
}
"""Calls with each exit code, and what their errors have: the cause, or the next step."""


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [(code, *call) for code, calls in WRONG_CALLS.items() for call in calls],
)
def test_a_wrong_call_names_its_cause_and_the_next_step_before_any_work(
    here: Path, code: int, words: str, message: str, cli: CommandLine
) -> None:
    before = sorted(here.rglob("*"))
    out, err = cli.run(*words.split(), code=code)
    text = " ".join(f"{out} {err}".split())
    assert err
    assert "Traceback" not in text
    assert re.search(message, text) or message in text, text
    if "--json" not in words:
        assert "error" in json.loads(cli.run(*words.split(), "--json", code=code)[0])
    assert sorted(here.rglob("*")) == before
