"""The entry point of the command line: commands, exit codes, errors and JSON.

A command is a module of this package with a click command named `command`, and a line in COMMANDS. It is
imported when it is called. It prints its result with `print_result` and does not catch errors of megackpt. It
imports torch only when it runs, so that its help does not wait for torch.

An error of megackpt is printed as one line on stderr, without a traceback. For exit codes see EXIT_CODES.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from megackpt.errors import (
    CheckpointError,
    CoverageError,
    FormatError,
    IntegrityError,
    MismatchError,
    NotACheckpointError,
)

COMMANDS = {
    "bench": "Measure saving and loading in a directory.",
    "convert": "Write a checkpoint in another format.",
    "demo": "Save a checkpoint at one layout, load it at another, and show how.",
    "diff": "Compare two checkpoints, bit by bit.",
    "gc": "Remove incomplete steps, and steps that no rule keeps.",
    "inspect": "Show the content of a checkpoint.",
    "ls": "List the steps of a run.",
    "maps": "Show where our arrays are in other families of names.",
    "pin": "Protect a step from removal.",
    "plan": "Plan saves and loads of a job of any size, without running it.",
    "repair": "Repair a damaged checkpoint.",
    "verify": "Find damage in a checkpoint.",
}
"""The one-line help of each command, by its name, which is also the name of its module in this package."""

FAILED_CHECK = 1
BAD_INPUT = 2
UNREADABLE = 3
INTERRUPTED = 130  # as shells report SIGINT

_CHECKS = (IntegrityError, CoverageError, MismatchError)
_UNREADABLE = (NotACheckpointError, FormatError)

EXIT_CODES = (
    "Exit codes: 0 done, no fault found; 1 a check has failed: damaged, incomplete or different; 2 bad "
    "usage or input; 3 no checkpoint, or none that can be read here."
)
"""The last lines of the help of a command."""

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Finds commands in COMMANDS, so that `--help` and a command do not import the other commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; return None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"megackpt.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the one-line help of each command, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="megackpt", message="%(package)s %(version)s")
def commands() -> None:
    """Inspect, verify, compare, convert, repair and clean up distributed checkpoints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; arguments are those of the process if None."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = commands.main(args=words, prog_name="megackpt", standalone_mode=False)
    except click.ClickException as error:
        if is_rank_0():
            error.show()
        return BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except CheckpointError as error:
        if is_rank_0():
            _print_error(error, as_json="--json" in words)
        return _exit_code(error)
    return code if isinstance(code, int) else 0


def json_option(command: F) -> F:
    """Add `--json`, which a command takes as `as_json` and passes to `print_result`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def unsafe_pickle_option(command: F) -> F:
    """Add `--allow-unsafe-pickle`."""
    return click.option(
        "--allow-unsafe-pickle",
        is_flag=True,
        help="Load any class that pickles name. This runs code that they choose: use it only for checkpoints "
        "that you trust.",
    )(command)


def print_result(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command on rank 0: the text, or the dict as JSON."""
    if is_rank_0():
        click.echo(json.dumps(result, indent=1, sort_keys=True) if as_json else text)


def is_rank_0() -> bool:
    """Return whether this process prints for all: under torchrun, rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def _exit_code(error: CheckpointError) -> int:
    if isinstance(error, _CHECKS):
        return FAILED_CHECK
    return UNREADABLE if isinstance(error, _UNREADABLE) else BAD_INPUT


def _print_error(error: CheckpointError, *, as_json: bool) -> None:
    line = " ".join(str(error).split())
    if as_json:
        fields = {"kind": type(error).__name__, "text": line, "key": error.key, "path": error.path}
        click.echo(json.dumps({"error": fields}, indent=1, sort_keys=True))
    click.echo(f"megackpt: {line}", err=True)
