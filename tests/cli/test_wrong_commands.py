"""What a user mistypes: one clear line on stderr, the exit code of docs/tools.md, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import Checkpointer
from megackpt.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint `whole`, a file, an empty directory and a run; no S3 server."""
    megackpt.save({"a": torch.ones(2)}, tmp_path / "whole")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").mkdir()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2)}, metrics={"loss": 1.0})
        checkpointer.save(2, {"a": torch.ones(2)}, metrics={"loss": 0.5})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    return tmp_path


def run_with_error(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and what stderr says; nothing is on stdout."""
    code = main(arguments.split())
    message = capsys.readouterr()
    assert message.out == ""
    return code, message.err


@pytest.mark.parametrize("location", ["file", "empty", "nowhere"])
@pytest.mark.parametrize(
    "command", ["inspect {}", "verify {}", "repair {}", "diff whole {}", "convert {} new --to zarr"]
)
def test_a_location_without_a_checkpoint_has_exit_code_3_in_every_command(
    here: Path, command: str, location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = run_with_error(command.format(location), capsys)
    assert code == 3
    assert location in message
    assert ("is a file, not a checkpoint" if location == "file" else "is not a checkpoint") in message


@pytest.mark.parametrize("location", ["file", "nowhere"])
@pytest.mark.parametrize(
    "command", ["ls {}", "pin {} --list", "pin {} 1", "pin {} 1 --remove", "gc {} --keep-all"]
)
def test_a_root_that_is_not_a_directory_has_exit_code_3_in_every_command(
    here: Path, command: str, location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"megackpt: {location} is not a directory. Name the one that a Checkpointer saves to.\n"
    assert run_with_error(command.format(location), capsys) == (3, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan nosuch --from tp8", "'nosuch' is no model, file or directory"),
        ("plan llama3-8b --from tp3", "is not a multiple of tp=3"),
        ("plan llama3-8b --from tp8,world12", "12 ranks cannot be divided so"),
        ("plan llama3-8b --from foo", "'foo' is not an axis with its size. Write one as tp8,pp16,dp128"),
        ("plan llama3-8b --from tp8,tp4", "it names an axis twice. Write one as tp8,pp16,dp128"),
        ("bench --dir new --cases foo", "'foo' is no case. Known are save"),
        ("bench --dir new --profile nowhere/x.json", "nowhere/x.json: there is no such directory"),
        ("bench --dir new --chart chart.txt", "chart.txt: no chart can be drawn there"),
        ("bench --dir new --size 999999999T --cases small", "bytes, and new has"),
        ("plan gpt-125m --from tp2 --ranks-per-node 99999999999999999999", "ranks_per_node is 9999"),
        ("diff whole whole --keys b*", "No key of whole or whole matches 'b*'"),
        ("ls http://host/run", "there is no store for http:// locations"),
        ("verify s3://", "not a URL of an object store"),
        ("gc run --keep-all --min-age nan", "--min-age is nan; give a finite number of at least 0"),
        ("pin run 99999999999999999999999", "step is 99999999999999999999999; steps are counted from 0"),
        ("gc run --keep-best lost", "no committed step of run was saved with that metric; known are loss"),
    ],
)
def test_bad_input_is_an_error_before_any_work(
    here: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    code = main(arguments.split())
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "endpoint", "message"),
    [
        ("verify s3://bucket/run", "http://127.0.0.1:9", "no connection"),
        ("verify s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("ls s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("repair s3://bucket/run", "nowhere", "must begin with http:// or https://"),
        ("pin s3://bucket/run --list", "nowhere", "must begin with http:// or https://"),
    ],
)
def test_a_store_that_cannot_be_reached_is_bad_input_and_not_damage(
    here: Path, command: str, endpoint: str, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    code, err = run_with_error(command, capsys)
    assert code == 2
    assert message in err
