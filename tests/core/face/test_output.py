"""What every command prints: one JSON document, tables that can be copied, progress on a terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from rich.console import Console

import megackpt
from megackpt import Checkpointer, ShardedTensor
from megackpt.bench.report import Report
from megackpt.cli import progress
from megackpt.cli.entry import commands
from megackpt.cli.progress import ProgressBars
from tests.core.face.test_show_commands import CONFIG
from tests.support.command_line import CommandLine

CALLS = {
    "bench": "--dir bench",
    "convert": "run converted --to megackpt",
    "demo": "",
    "diff": "run run",
    "gc": "run --keep-last 1",
    "inspect": "run",
    "ls": "run",
    "maps": "",
    "maps show": "--config config.json",
    "pin": "run 1",
    "plan": "gpt-125m --from tp1",
    "repair": "run/iter_0000002",
    "verify": "run --deep",
}
"""Arguments of a call of each command that succeeds."""


def all_commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a command that can be called, as click finds them, with their names."""
    if names and (not isinstance(command, click.Group) or command.invoke_without_command):
        yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from all_commands(subcommand, *names, name)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run of two steps and a config; `bench` measures nothing."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    machine = {"peers": {}, "load_before": 0.0, "cpus": 1, "has_cold_files": True}
    report = Report(command={"peers": []}, machine=machine, state={"nbytes": 1}, rows=())
    monkeypatch.setattr("megackpt.bench.world.run_bench", lambda settings: report)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is drawn on stderr, which bars take for a terminal."""
    text = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=text, force_terminal=True, width=120)
    )
    return text


def test_every_command_is_called_here_and_has_the_options() -> None:
    by_name = dict(all_commands(commands))
    assert set(by_name) == set(CALLS), "add the new command to CALLS"
    for name, command in by_name.items():
        flags = {option for parameter in command.params for option in parameter.opts}
        assert flags >= {"--json", "--quiet", "-q"}, name


@pytest.mark.parametrize("name", CALLS)
def test_json_is_one_document_and_nothing_else_is_printed(here: Path, name: str, cli: CommandLine) -> None:
    out, err = cli.run(*name.split(), *CALLS[name].split(), "--json", "--quiet")
    assert isinstance(json.loads(out), dict)
    assert err == ""


# The ranks of a benchmark are other processes, which draw a line of their own.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"bench"}))
def test_progress_is_drawn_on_a_terminal_and_not_with_quiet(
    here: Path, name: str, terminal: io.StringIO, cli: CommandLine
) -> None:
    arguments = [*name.split(), *CALLS[name].split()]
    notes = cli.err(*arguments, code=0).count("megackpt: ")
    assert "0:00:0" in terminal.getvalue()  # seconds
    for path in here.glob("converted"):
        shutil.rmtree(path)
    drawn = terminal.getvalue()
    notes += cli.err(*arguments, "--quiet", code=0).count("megackpt: ")
    assert terminal.getvalue() == drawn
    assert notes <= 2  # only of the first


def test_flags_before_the_name_of_a_subcommand_hold_for_it(
    here: Path, terminal: io.StringIO, cli: CommandLine
) -> None:
    out = cli.out("maps", "--json", "--quiet", "show", "--config", "config.json")
    assert json.loads(out)["family"] == CONFIG["model_type"]
    assert terminal.getvalue() == ""


def test_a_bar_shows_amount_rate_and_time_left(terminal: io.StringIO) -> None:
    with ProgressBars("reading metadata") as bars:
        bars.begin("writing", 4_000_000)
        bars.advance(1_000_000)
        bars.advance(2_000_000)
        bars.begin_count("planning, ranks", 8192)
        bars.advance(8192)
    drawn = terminal.getvalue()
    assert "3.0 MB of 4.0 MB, " in drawn
    assert "B/s" in drawn
    assert " left" in drawn
    assert "8,192, " in drawn


def test_nothing_is_drawn_where_stderr_is_no_terminal() -> None:
    text = io.StringIO()
    with ProgressBars(console=Console(file=text, force_terminal=False)) as bars:
        bars.begin("writing", 4_000_000)
        bars.advance(4_000_000)
    assert text.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "code"), [("verify nowhere", 3), ("verify --depp run", 2), ("verfy run", 2), ("ls", 2)]
)
def test_errors_are_json_too(here: Path, arguments: str, code: int, cli: CommandLine) -> None:
    out, err = cli.run(*arguments.split(), "--json", code=code)
    error = json.loads(out)["error"]
    assert set(error) == {"kind", "text", "key", "path"}
    assert error["text"] in " ".join(err.split())


def test_an_interrupted_command_prints_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(megackpt.maintenance.verify, "verify_checkpoint", interrupt)
    assert "megackpt: interrupted. " in cli.err("verify", "run", code=130)


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
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", cli.out("inspect", checkpoint)).splitlines()
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


def test_in_a_pipe_each_row_is_a_line(checkpoint: Path, cli: CommandLine) -> None:
    lines = cli.out("inspect", checkpoint).splitlines()
    for key in KEYS:
        assert len([line for line in lines if f" {key} " in line]) == 1
