"""Help does not wait for torch: it imports nothing that it does not need."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megackpt
from megackpt.cli import main
from megackpt.cli.entry import COMMANDS

ROOT = Path(megackpt.__file__).parent
HEAVY = ("torch", "matplotlib", "tensorstore", "obstore")


def modules_after(program: str, names: tuple[str, ...] = HEAVY) -> set[str]:
    """Return which of some modules a fresh interpreter has imported at the end of a program."""
    message = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(names) & set(message.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    assert modules_after(f"from megackpt.cli import main\nassert main({arguments!r}) == 0") == set()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"  {name} " in out
        assert what.split(",")[0] in out
    files = {path.stem for path in (ROOT / "cli").glob("*.py") if "@click.command(name=" in path.read_text()}
    assert files == set(COMMANDS)


def test_the_package_imports_its_names_at_their_first_use() -> None:
    assert modules_after("import megackpt") == set()
    assert "torch" in modules_after("import megackpt; megackpt.save")
    assert "torch" in modules_after("from megackpt import *")
    assert "Checkpointer" in dir(megackpt)
    assert megackpt.errors.CheckpointError is megackpt.CheckpointError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        megackpt.nothing  # noqa: B018


def test_names_come_from_where_type_checkers_see_them() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == megackpt._MODULE_OF


def test_saving_and_loading_imports_nothing_of_the_command_line_and_no_extra(tmp_path: Path) -> None:
    program = f"""
import megackpt, torch
directory = {str(tmp_path / "checkpoint")!r}
megackpt.save({{"w": torch.ones(2)}}, directory)
megackpt.load({{}}, directory)
assert megackpt.verify(directory, deep=True).is_whole
"""
    assert modules_after(program, ("click", "rich", "matplotlib", "tensorstore", "obstore")) == set()


@pytest.mark.parametrize("command", ["plan llama3-8b --from tp8", "bench --dir new --cases small"])
def test_a_chart_without_matplotlib_is_an_error_that_names_the_extra_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megackpt.cli.locations.find_spec", lambda name: None)
    assert main([*command.split(), "--chart", "chart.png"]) == 2
    assert "pip install 'megackpt[plots]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_shell_completes_the_names_of_commands() -> None:
    words = {"COMP_WORDS": "megackpt ", "COMP_CWORD": "1", "_MEGACKPT_COMPLETE": "bash_complete"}
    run = subprocess.run(
        [sys.executable, "-c", "from megackpt.cli import main; main()"],
        env=dict(os.environ, **words),
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.removeprefix("plain,") for line in run.stdout.split()} == set(COMMANDS)
