"""The entry point of the command line: commands, exit codes, errors and JSON.

A command is a module of this package with a click command named `command`, and a line in COMMANDS. It is
imported when it is called. It prints its result with `print_result`, or with `print_json` if `wants_json`. It
does not catch errors of megackpt. It imports torch only when it runs: its help does not wait for torch.

An error of megackpt, of the system or of usage is printed as one line on stderr, without a traceback. With
`--json` it is also the one JSON document on stdout. For exit codes see EPILOG.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from megackpt.errors import (
    CheckpointError,
    CoverageError,
    FormatError,
    IntegrityError,
    MismatchError,
    NotACheckpointError,
    StorageError,
)
from megackpt.storage.error_translation import storage_error

COMMANDS = {
    "bench": "Measure saving and loading in a directory.",
    "convert": "Write a checkpoint in another format.",
    "demo": "Save a checkpoint at one layout, load it at another, and show how.",
    "diff": "Compare two checkpoints, bit by bit.",
    "gc": "Remove incomplete steps, and steps that no rule keeps.",
    "init": "Write a training script to begin with.",
    "inspect": "Show the content of a checkpoint.",
    "ls": "List the steps of a run.",
    "maps": "Show where our arrays are in other families of names.",
    "pin": "Protect a step from removal.",
    "plan": "Plan saves and loads of a job of any size, without running it.",
    "repair": "Repair a damaged checkpoint.",
    "rollback": "Let a run go back to an older step.",
    "verify": "Find damage in a checkpoint.",
}
"""The one-line help of each command, by its name, which is also the name of its module in this package."""

_OTHER_WORDS = {
    "check": "verify",
    "compare": "diff",
    "delete": "gc",
    "export": "convert",
    "fix": "repair",
    "help": "--help",
    "import": "convert",
    "info": "inspect",
    "prune": "gc",
    "remove": "gc",
    "rm": "gc",
    "show": "inspect",
    "status": "ls",
    "unpin": "pin --remove",
    "validate": "verify",
    "version": "--version",
}
"""Names of commands of other tools, with ours."""

FAILED_CHECK = 1
BAD_INPUT = 2
UNREADABLE = 3
INTERRUPTED = 130  # as shells report SIGINT
CLOSED_PIPE = 141  # as shells report SIGPIPE

_INTERRUPTED_TEXT = (
    "interrupted. What was not finished is not a checkpoint. Run the same command again to go on."
)

_CHECKS = (IntegrityError, CoverageError, MismatchError)
_UNREADABLE = (NotACheckpointError, FormatError)

FLAGS_OF_ALL = ("--json", "--quiet", "-q")
"""Flags that every command takes, before its name or anywhere after it."""

EPILOG = (
    "Every command takes --json and --quiet: see megackpt --help. Exit codes: 0 done, no fault found; 1 a "
    "check has failed: damaged, incomplete or different; 2 bad usage or input; 3 no checkpoint, or none that "
    "can be read here."
)
"""The last lines of the help of a command."""

F = TypeVar("F", bound=Callable[..., Any])


class CommandWithSections(click.Command):
    """A command whose help lists its options by what they concern.

    Args:
        sections: the options of each section, by the names of their parameters; all others come last.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options, section by section."""
        records = {
            str(param.name): record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))


class _Commands(click.Group):
    """Finds commands in COMMANDS, so that `--help` and a command do not import the other commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags of all commands first, so that they may stand anywhere; after `--` are no flags."""
        end = args.index("--") if "--" in args else len(args)
        flags = [word for word in args[:end] if word in FLAGS_OF_ALL]
        others = [word for word in args[:end] if word not in FLAGS_OF_ALL]
        return super().parse_args(ctx, [*flags, *others, *args[end:]])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; return None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"megackpt.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names. The error for an unknown one names similar ones."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ours = _OTHER_WORDS.get(args[0])
            similar = get_close_matches(args[0], COMMANDS) if ours is None else [ours]
            advice = f"Did you mean {', '.join(similar)}?" if similar else f"There are {', '.join(COMMANDS)}."
            ctx.fail(f"There is no command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the one-line help of each command, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="megackpt", message="%(package)s %(version)s")
@click.option("--json", "as_json", is_flag=True, help="Print the result of a command as JSON on stdout.")
@click.option(
    "-q", "--quiet", "is_quiet", is_flag=True, help="No progress and no notes on stderr, only errors."
)
@click.pass_context
def commands(context: click.Context, *, as_json: bool, is_quiet: bool) -> None:
    """Inspect, verify, compare, convert, repair and clean up distributed checkpoints."""
    context.meta.update(as_json=as_json, is_quiet=is_quiet)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; arguments are those of the process if None."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = io.StringIO()
    try:
        code = commands.main(args=words, prog_name="megackpt", standalone_mode=False)
    except click.ClickException as error:
        _print_error(error, error.format_message(), as_json=as_json)
        return BAD_INPUT
    except (click.Abort, KeyboardInterrupt) as error:
        _print_error(error, _INTERRUPTED_TEXT, as_json=as_json)
        return INTERRUPTED
    except CheckpointError as error:
        _print_error(error, str(error), as_json=as_json)
        return _exit_code(error)
    except SystemExit:  # of click and rich, when the reader of the pipe has gone, as in `| head -1`
        return CLOSED_PIPE
    except OSError as error:  # outside of stores, which translate theirs
        translated = storage_error(error, action="use", path=str(error.filename or "a file"))
        _print_error(translated, str(translated), as_json=as_json)
        return BAD_INPUT
    return code if isinstance(code, int) else 0


def wants_json() -> bool:
    """Return whether the command that runs now was called with `--json`."""
    return _is_set("as_json")


def is_quiet() -> bool:
    """Return whether the command that runs now was called with `--quiet`."""
    return _is_set("is_quiet")


def _is_set(flag: str) -> bool:
    """Return the value of a flag that every command takes; False outside of a command."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(flag))


def note(text: str) -> None:
    """Print a note on stderr, on rank 0; not with `--quiet`."""
    if is_rank_0() and not is_quiet():
        click.echo(f"megackpt: {text}", err=True)


def unsafe_pickle_option(command: F) -> F:
    """Add `--allow-unsafe-pickle`."""
    return click.option(
        "--allow-unsafe-pickle",
        is_flag=True,
        help="Load any class that pickles name. This runs code that they choose: use it only for checkpoints "
        "that you trust.",
    )(command)


def print_result(result: dict[str, Any], text: str) -> None:
    """Print the result of a command on rank 0: the text, or with `--json` the dict."""
    if wants_json():
        print_json(result)
    elif is_rank_0():
        click.echo(text)


def print_json(result: dict[str, Any]) -> None:
    """Print the result of a command as JSON, on rank 0."""
    if is_rank_0():
        click.echo(json.dumps(result, indent=1, sort_keys=True))


def is_rank_0() -> bool:
    """Return whether this process prints for all: under torchrun, rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def _exit_code(error: CheckpointError) -> int:
    # A store that has lost a file of a committed checkpoint is reached, and the checkpoint is incomplete.
    is_lost = isinstance(error, StorageError) and error.errno == errno.ENOENT
    if is_lost or isinstance(error, _CHECKS):
        return FAILED_CHECK
    return UNREADABLE if isinstance(error, _UNREADABLE) else BAD_INPUT


def _print_error(error: BaseException, text: str, *, as_json: bool) -> None:
    if not is_rank_0():
        return
    line = " ".join(text.split())
    if as_json:
        key, path = getattr(error, "key", None), getattr(error, "path", None)
        fields = {"kind": type(error).__name__, "text": line, "key": key, "path": path}
        click.echo(json.dumps({"error": fields}, indent=1, sort_keys=True))
    if isinstance(error, click.ClickException):
        error.show()
    else:
        click.echo(f"megackpt: {line}", err=True)
