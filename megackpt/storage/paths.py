"""Local paths as users give them: relative ones, and those below a home directory."""

from __future__ import annotations

import os


def expanded_path(path: str | os.PathLike[str]) -> str:
    """Return a path with `~` and `~user` at its beginning replaced by a home directory, as a shell does.

    A path whose user does not exist stays as it is.

    >>> expanded_path("/ckpt/~run"), expanded_path("./~")
    ('/ckpt/~run', './~')
    """
    return os.path.expanduser(os.fspath(path))


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an expanded path that means the same after the process has changed its directory."""
    return os.path.abspath(expanded_path(path))
