"""Paths and URLs as users type them, checked before a command begins its work."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from megackpt.cli.entry import note
from megackpt.errors import DeclarationError, MissingExtraError, NotACheckpointError
from megackpt.formats.registry import detect_foreign, recognise
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import expanded_path, is_url, opened_store

CHART_SUFFIXES = (".png", ".svg", ".pdf")


class LocalPath(click.Path):
    """A path on a file system. `~` is the home directory, also in `--chart=~/x.png`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, as text."""
        return super().convert(expanded_path(value), param, ctx)


def checkpoint_location(path: str, *, takes_latest: bool = True) -> str:
    """Return the location of a checkpoint. For the root of a run: its latest step, named on stderr.

    takes_latest is False for commands that change the checkpoint: they need the path of a step, and no file.

    Raises:
        NotACheckpointError: the location is not a directory, or is the root of a run if a step is needed.
        StorageError: the location is a URL that no store serves.
    """
    if takes_latest and not is_url(path) and Path(expanded_path(path)).is_file():
        with opened_store(path) as store:
            if detect_foreign(store) is not None:
                return path
    step = _latest_step(path)
    if step is None:
        return path
    if not takes_latest:
        raise NotACheckpointError(
            f"{path} is the root of a run, not a checkpoint. Name a step of it; the latest is {step}.",
            path=path,
        )
    note(f"{path} is the root of a run; its latest step is {step}.")
    return step


def check_directory(path: str) -> None:
    """Check that a path is a directory. URLs are accepted.

    Raises:
        NotACheckpointError: there is a file, or nothing.
    """
    if is_url(path) or Path(expanded_path(path)).is_dir():
        return
    if Path(expanded_path(path)).is_file():
        with opened_store(path) as store:
            seen = recognise(store)
        what = "is a file, not a checkpoint. Name the directory of a finished one."
        if seen is not None:
            what = f"is a file: {seen.name}. {seen.advice}"
    elif Path(expanded_path(path)).exists():
        what = "is neither a directory nor a file. Name the directory of a checkpoint."
    else:
        what = (
            f"is not a checkpoint: there is no such directory.{_step_meant(path)} Check the path; `megackpt "
            "ls ROOT` lists the steps of a run, and step 100 is ROOT/iter_0000100."
        )
    raise NotACheckpointError(f"{path} {what}", path=path)


def _step_meant(path: str) -> str:
    """Return a question that names the directory of a step, if the path ends with its number; or nothing."""
    from megackpt.engine.checkpoint.steps import step_name

    number = re.search(r"\d{1,18}$", path)
    meant = Path(path).parent / step_name(int(number[0])) if number else None
    return f" Did you mean {meant}?" if meant is not None and Path(expanded_path(str(meant))).is_dir() else ""


def check_target(path: str) -> None:
    """Check that a checkpoint can be written to a location: it may not hide the steps of a run.

    Raises:
        DeclarationError: the location is a file, or the root of a run.
        StorageError: the location is a URL that no store serves.
    """
    if Path(expanded_path(path)).is_file():
        raise DeclarationError(f"{path} is a file. Name a directory that is new.", path=path)
    from megackpt.run.checkpointer.root import RunRoot

    if RunRoot(path).steps():
        raise DeclarationError(
            f"{path} is the root of a run. Name a directory that is new, such as {path}-converted.", path=path
        )


def _latest_step(path: str) -> str | None:
    """Return the location of the latest step of a run; None if the path is not the root of a run."""
    check_directory(path)
    with opened_store(path) as store:
        if store.exists(MANIFEST):
            return None
    from megackpt.run.checkpointer.root import RunRoot

    run = RunRoot(path)
    newest = run.tree().newest
    return None if newest is None else run.location(newest)


def check_run_root(root: str) -> None:
    """Check that the root of a run exists if it is on a file system. The root at a URL may still be empty.

    Raises:
        NotACheckpointError: the root is not a directory, or is itself a checkpoint.
        StorageError: the root is a URL that no store serves.
    """
    with opened_store(root) as store:
        is_directory = is_url(root) or Path(expanded_path(root)).is_dir()
        if is_directory and store.exists(MANIFEST):
            raise NotACheckpointError(
                f"{root} is a single checkpoint and has no steps. Look into it with `megackpt inspect`, or "
                f"name the directory above it.",
                path=root,
            )
        seen = recognise(store) if not is_directory and Path(expanded_path(root)).is_file() else None
    if not is_directory:
        what = f" It is {seen.name}. {seen.advice}" if seen is not None else ""
        raise NotACheckpointError(
            f"{root} is not a directory. Name the one that a Checkpointer saves to.{what}", path=root
        )


def check_chart(path: str | None) -> None:
    """Check that a chart can be drawn to a file, before its data is computed. None is accepted.

    Raises:
        DeclarationError: the suffix names no known format, or the directory of the file does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in CHART_SUFFIXES or not Path(path).absolute().parent.is_dir():
        raise DeclarationError(
            f"{path}: no chart can be drawn there. Give a file with one of the suffixes "
            f"{', '.join(CHART_SUFFIXES)} in a directory that exists.",
            path=path,
        )
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            f"{path}: charts need the package matplotlib, which is not installed. Install it with: "
            f"pip install 'megackpt[plots]'",
            path=path,
        )
