"""What all commands have in common: where they are found, exit codes, errors, JSON.

A command is a file of this folder with a click command named `command`, and one line in COMMANDS. It is
imported when it is called, says its result through `say`, and raises errors of megackpt as they come. What
needs torch it imports when it runs, so that its help does not wait for torch.

Exit codes: 0, it is done; 1, a check has failed: data are damaged, incomplete or different; 2, it could not
be done with what was given; 3, there is no checkpoint, or none that can be read here. An error of megackpt is
one line on stderr, without a traceback.
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
    "convert": "Write a checkpoint once more, in another format.",
    "diff": "Compare two checkpoints, bit by bit.",
    "gc": "Remove incomplete steps and steps not kept.",
    "inspect": "Show what a checkpoint holds.",
    "ls": "List the steps of a run.",
    "pin": "Keep a step, whatever a run's retention says.",
    "plan": "Plan saves and loads of a job of any size, without running it.",
    "repair": "Mend a damaged checkpoint.",
    "verify": "Look for damage in a checkpoint.",
}
"""What each command does, by its name, which is that of its module in this folder."""

FAILED_CHECK = 1
BAD_INPUT = 2
UNREADABLE = 3
INTERRUPTED = 130  # as shells have it for SIGINT

_CHECKS = (IntegrityError, CoverageError, MismatchError)
_UNREADABLE = (NotACheckpointError, FormatError)

EXIT_CODES = (
    "Exit codes: 0 done, and nothing is wrong; 1 a check has failed: damaged, incomplete or different; 2 bad "
    "usage or input; 3 no checkpoint, or none that can be read here."
)
"""For the help of a command, which click ends with it."""

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Finds commands by COMMANDS, so that `--help` and one command do not import the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"megackpt.cli.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the commands do, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="megackpt", message="%(package)s %(version)s")
def commands() -> None:
    """Look into distributed checkpoints, and change them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; arguments are those of the process if None. Return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        returned = commands.main(args=given, prog_name="megackpt", standalone_mode=False)
    except click.ClickException as error:
        if is_root():
            error.show()
        return BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except CheckpointError as error:
        if is_root():
            _say_error(error, as_json="--json" in given)
        return _exit_code(error)
    return returned if isinstance(returned, int) else 0


def json_option(command: F) -> F:
    """Add `--json`, which a command gets as `as_json` and hands to `say`."""
    return click.option("--json", "as_json", is_flag=True, help="Say the result as JSON on stdout.")(command)


def unsafe_pickle_option(command: F) -> F:
    """Add `--allow-unsafe-pickle`."""
    return click.option(
        "--allow-unsafe-pickle",
        is_flag=True,
        help="Load any class that pickles name. This runs code that they choose: only for what you trust.",
    )(command)


def say(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command on rank 0: the text, or the dict as JSON."""
    if is_root():
        click.echo(json.dumps(result, indent=1, sort_keys=True) if as_json else text)


def is_root() -> bool:
    """Whether this process speaks for all: under torchrun rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def _exit_code(error: CheckpointError) -> int:
    if isinstance(error, _CHECKS):
        return FAILED_CHECK
    return UNREADABLE if isinstance(error, _UNREADABLE) else BAD_INPUT


def _say_error(error: CheckpointError, *, as_json: bool) -> None:
    line = " ".join(str(error).split())
    if as_json:
        said = {"kind": type(error).__name__, "text": line, "key": error.key, "path": error.path}
        click.echo(json.dumps({"error": said}, indent=1, sort_keys=True))
    click.echo(f"megackpt: {line}", err=True)
