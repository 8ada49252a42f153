"""Which store serves a path.

Owns the one decision of how a user's path or URL maps to a kind of store.
"""

from __future__ import annotations

import os
import re

from megackpt.errors import StorageError
from megackpt.storage.local import LocalStore
from megackpt.storage.store import Store

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(path: str | os.PathLike[str]) -> Store:
    """Return the store for a checkpoint directory. Local; nothing is touched yet.

    Raises:
        StorageError: `path` is an URL of a kind that no store serves, or empty.

    >>> open_store("/ckpt/iter_0000100").location
    '/ckpt/iter_0000100'
    """
    text = os.fspath(path)
    if not text:
        raise StorageError(
            "'': an empty path names no checkpoint directory. Give its path, or '.' for this one."
        )
    url = _URL.match(text)
    if url:
        raise StorageError(
            f"{text}: there is no store for {url['scheme']}:// locations. Mount it as a directory and give "
            "that path (a local path is given without a scheme), or pass an object with the methods of "
            "megackpt.storage.Store.",
            path=text,
        )
    return LocalStore(text)
