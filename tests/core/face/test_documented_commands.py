"""Shell commands of README.md and docs/, and help: ours run or parse, others name what exists."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import torch

import megackpt
from megackpt import Checkpointer, SaveOptions
from megackpt.cli import main
from megackpt.cli.entry import COMMANDS, FAILED_CHECK, FLAGS_OF_ALL, commands
from tests.support.checkpoints import flip
from tests.support.command_line import CommandLine
from tests.support.docs import DOCUMENTS, ROOT, blocks_of

SHELL = {"bash", "sh", "console"}
PARSED_ONLY = {
    "docs/huggingface.md": "tests/core/face/test_convert.py converts",
    "docs/fine-tuning.md": "tests/training/models/test_merged_export.py merges adapters",
    "docs/performance.md": "measures for minutes; tests/system/test_bench.py measures less",
}
"""Pages whose commands take too long or need folders of others, with the test that has them in small."""
TOO_LONG = {"plan": "plans 16384 ranks for a minute; tests/core/face/test_plan.py plans fewer"}
"""Commands that pages whose commands run have, but only parsed."""
TESTED_SCRIPTS = {
    "examples/elastic_resume.py": "README.md's command, run by .ci/run",
    "examples/quickstart.py": "tests/system/examples/test_quickstart.py",
    "examples/hosts/megatron_core.py": "tests/contrib/test_hosts.py",
    "examples/pretrain_gpt.py": "tests/system/examples/test_resumes.py",
    "tests/benchmarks/bench_gpu.py": "needs a CUDA device",
    "tests/benchmarks/bench_peers.py": "tests/system/test_bench.py",
    "tests/system/attacks/fuzz_reader.py": "runs until it finds a fault; needs atheris",
}
"""Scripts that the docs start, and what runs them or why nothing does."""
TOOLS = {"mkdocs", "mypy", "ruff"}
"""Other programs, all of which .ci/run calls."""


def command_lines(text: str) -> list[list[str]]:
    """Return the commands of all shell blocks of a page as words, without prompts, comments and output."""
    lines: list[str] = []
    for block in blocks_of(text):
        if block.kind == "console":
            lines += re.findall(r"^\$ (.*)$", block.code, re.MULTILINE)
        elif block.kind in SHELL:
            lines += block.code.replace("\\\n", " ").splitlines()
    codes = [re.sub(r"(^| )#.*", "", line) for line in lines]
    words = [shlex.split(part) for code in codes for part in re.split("&&|;", code)]
    return [w for w in words if w]


def inline_commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of megackpt in backticks within sentences."""
    for command in re.findall(r"`megackpt ([a-z]+ [^`]*)`", text):
        if command.partition(" ")[0] in COMMANDS:
            yield shlex.split(command)


PAGES = {
    str(path.relative_to(ROOT)): lines for path in DOCUMENTS if (lines := command_lines(path.read_text()))
}


def parse(arguments: list[str]) -> None:
    """Raise click's error for an option that the command does not have, or a choice that it does not."""
    # With the settings of the program: a command keeps the option for help that its first context has.
    context = click.Context(commands, **commands.context_settings)
    command = commands.get_command(context, arguments[0])
    while isinstance(command, click.Group):
        arguments = arguments[1:]
        context = click.Context(command, parent=context)
        command = command.get_command(context, arguments[0])
    assert command is not None, f"there is no command {arguments[0]}"
    context = click.Context(command, parent=context, info_name=arguments[0])
    own = [word for word in arguments[1:] if word not in FLAGS_OF_ALL]
    values, _, _ = command.make_parser(context).parse_args(own)
    for option in command.params:
        if isinstance(option.type, click.Choice) and isinstance(value := values.get(option.name or ""), str):
            option.type.convert(value, option, context)


def of_megackpt(words: list[str]) -> list[str] | None:
    """Return the arguments of a command of megackpt; None if it is another program's."""
    if words[0] == "megackpt":
        return words[1:]
    return words[words.index("megackpt.cli") + 1 :] if "megackpt.cli" in words else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_megackpt_have_these_options(page: str) -> None:
    for words in PAGES[page]:
        if (arguments := of_megackpt(words)) is not None:
            parse(arguments)


def test_commands_within_sentences_have_these_options() -> None:
    inline = [command for path in DOCUMENTS for command in inline_commands(path.read_text())]
    assert len(inline) > 20
    for arguments in inline:
        with contextlib.suppress(click.BadOptionUsage):  # an option is named without its value
            parse(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_other_commands_name_what_there_is(page: str) -> None:
    extras = re.findall(r"^(\S+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    options = (ROOT / "tests" / "conftest.py").read_text()
    for words in PAGES[page]:
        if of_megackpt(words) is not None or words[0] in TOOLS:
            continue
        words = [w for w in words if not re.match(r"[A-Z_]+=", w)]
        if words[:2] == ["pip", "install"]:
            wanted = re.findall(r"\[(.*)\]", words[-1])
            assert set(wanted) <= set(extras), words
        elif words[0] == "pytest":
            named = [w for w in words if w.startswith("--") and not w.startswith("--dist")]
            assert [w for w in named if f'"{w}"' not in options] == []
            assert [w for w in words if w.startswith("tests/") and not (ROOT / w).exists()] == []
        else:
            assert words[0] in ("python", "torchrun"), words
            assert any(w in TESTED_SCRIPTS for w in words), words
    assert [script for script in TESTED_SCRIPTS if not (ROOT / script).is_file()] == []


# -- Pages whose commands run -------------------------------------------------


def make_run(steps: list[int], root: str = "run") -> None:
    """Save these steps of a state with a few kilobytes and parity."""
    with Checkpointer(root, save_options=SaveOptions(parity=2)) as checkpointer:
        for step in steps:
            checkpointer.save(
                step, {"weight": torch.arange(4096.0), "step": step}, metrics={"loss": 1 / step}
            )


def prepare_operating() -> None:
    """A run whose step 1000 is damaged, and a whole copy of it."""
    make_run([200, 400, 600, 800, 1000])
    shutil.copytree("run/iter_0001000", "backup/iter_0001000")
    (file,) = Path("run/iter_0001000/data").iterdir()
    flip(file, -1)


def prepare_tools() -> None:
    make_run([4000, 5000, 6000])


def prepare_quickstart() -> None:
    make_run([10, 20], "quickstart")


PREPARATIONS: dict[str, Callable[[], None]] = {
    "docs/operating.md": prepare_operating,
    "docs/tools.md": prepare_tools,
    "docs/commands.md": prepare_tools,
    "docs/index.md": prepare_quickstart,
}
FINDS_DAMAGE = ["verify", "run/iter_0001000", "--deep"]


def test_each_page_runs_or_is_listed() -> None:
    calls_us = {page for page, lines in PAGES.items() if any(of_megackpt(words) for words in lines)}
    assert calls_us == PREPARATIONS.keys() | PARSED_ONLY.keys()


@pytest.mark.parametrize("page", PREPARATIONS)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARATIONS[page]()
    for words in PAGES[page]:
        arguments = of_megackpt(words)
        if arguments is not None and arguments[0] not in TOO_LONG:
            expected = FAILED_CHECK if arguments == FINDS_DAMAGE else 0
            assert main(arguments) == expected, words
    if page == "docs/operating.md":
        assert main(FINDS_DAMAGE) == 0  # the last command of the page has repaired it


def cron_commands() -> list[str]:
    """Return the commands of the crontab of docs/operating.md, for a run in the present directory."""
    blocks = blocks_of((ROOT / "docs" / "operating.md").read_text())
    (table,) = (block.code for block in blocks if block.kind == "crontab")
    commands_of_times = re.findall(r"^(?:\S+ ){5}(.*)$", table, re.MULTILINE)
    program = shlex.join([sys.executable, "-m", "megackpt.cli"])
    return [c.replace("megackpt ", f"{program} ").replace("/mnt/shared/", "") for c in commands_of_times]


def test_the_lines_for_cron_print_only_if_a_step_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(command: str) -> str:
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    make_run([10, 20])
    structure, every_byte = cron_commands()
    assert printed(every_byte) == ""
    (file,) = Path("run/iter_0000020/data").iterdir()
    flip(file, -1)
    assert printed(structure) == ""
    output = printed(every_byte)
    assert output.startswith("exit code 1: ")
    assert output.endswith("newest good step: 10\n")


PACKAGE = Path(megackpt.__file__).parent


def test_help_names_every_command(cli: CommandLine) -> None:
    out = cli.out("--help")
    for name, what in COMMANDS.items():
        assert f"  {name} " in out
        assert what.split(",")[0] in out
    files = {
        path.stem for path in (PACKAGE / "cli").glob("*.py") if "@click.command(name=" in path.read_text()
    }
    assert files == set(COMMANDS)


def test_names_come_from_where_type_checkers_see_them() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == megackpt._MODULE_OF


@pytest.mark.parametrize("command", ["plan llama3-8b --from tp8", "bench --dir new --cases save"])
def test_a_chart_without_matplotlib_is_an_error_that_names_the_extra_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megackpt.cli.locations.find_spec", lambda name: None)
    assert "pip install 'megackpt[plots]'" in cli.err(*command.split(), "--chart", "chart.png", code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_shell_completes_the_names_of_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"COMP_WORDS": "megackpt ", "COMP_CWORD": "1", "_MEGACKPT_COMPLETE": "bash_complete"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        main([])
    assert {line.removeprefix("plain,") for line in capsys.readouterr().out.split()} == set(COMMANDS)
