"""Paths as a user types them: checked before a command begins.

Owns what a path has to be that a command reads from or writes a file to. What lies there is up to others.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from megackpt.cli.entry import is_root
from megackpt.errors import DeclarationError, NotACheckpointError
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import Store, expanded_path, is_url, open_store


class LocalPath(click.Path):
    """A path on a file system, in which `~` is the home directory, also in `--json=~/x.json`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, as text."""
        return super().convert(expanded_path(value), param, ctx)


def opened_checkpoint(path: str, *, takes_latest: bool = True) -> Store:
    """Return the store of a checkpoint. Of the root of a run: that of its latest step, which stderr says.

    takes_latest is False for commands that change the checkpoint: they have to be given the step.

    Raises:
        NotACheckpointError: it is a file; or the root of a run, and a step has to be named.
        StorageError: it is an URL that no store serves.
    """
    step = _latest_step(path)
    if step is None:
        return open_store(path)
    if not takes_latest:
        raise NotACheckpointError(
            f"{path} is the root of a run, and no checkpoint. Name a step of it; the latest is {step}.",
            path=path,
        )
    if is_root():
        click.echo(f"megackpt: {path} is the root of a run; its latest step is {step}.", err=True)
    return open_store(step)


def _latest_step(path: str) -> str | None:
    """Return where the latest step of a run is; None if the path is not the root of a run."""
    if Path(expanded_path(path)).is_file():
        raise NotACheckpointError(
            f"{path} is a file, and no checkpoint. Name the directory of a finished one.", path=path
        )
    with contextlib.closing(open_store(path)) as store:
        if store.exists(MANIFEST):
            return None
    from megackpt.checkpointer.run import Run

    run = Run(path)
    steps = run.steps()
    return run.location(steps[-1]) if steps else None


def check_root(root: str) -> None:
    """Check that the root of a run is there, if it is on a file system; an URL may have nothing yet.

    Raises:
        NotACheckpointError: it is no directory.
        StorageError: it is an URL that no store serves.
    """
    open_store(root)
    if not is_url(root) and not Path(expanded_path(root)).is_dir():
        raise NotACheckpointError(
            f"{root} is no directory. Name the one that a Checkpointer saves to.", path=root
        )


def check_output(path: str | None) -> None:
    """Check that a file can be written, before the work whose result it takes. None is fine.

    Raises:
        DeclarationError: its directory is not there.
    """
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise DeclarationError(
            f"{path}: there is no such directory. Give a file in one that exists.", path=path
        )
