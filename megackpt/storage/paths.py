"""Paths and URLs as users give them: relative paths, paths below a home directory, URLs of object stores."""

from __future__ import annotations

import os

SCHEMES = ("s3", "gs", "az")
"""Schemes of URLs that name object stores. Only s3 is tested."""


def is_object_url(text: str) -> bool:
    """Say whether a location is the URL of an object store."""
    return text.partition("://")[0] in SCHEMES and "://" in text


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
