"""Which store serves a path.

Owns the one decision of how a user's path or URL maps to a kind of store.
"""

from __future__ import annotations

import os
import re

from megackpt.errors import StorageError
from megackpt.storage.local import LocalStore
from megackpt.storage.object_library import ObjectOptions, is_object_url
from megackpt.storage.objects import ObjectStore
from megackpt.storage.store import Store

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_JOINED = re.compile(r"(s3|gs|az):/[^/]")


def open_store(path: str | os.PathLike[str], *, objects: ObjectOptions | None = None) -> Store:
    """Return the store for a checkpoint directory or the URL of one. Local; nothing is touched yet.

    objects are the options of an object store, if it is one.

    Raises:
        StorageError: `path` is an URL of a kind that no store serves, or empty.
        MissingExtraError: it is in an object store, and the library for those is not installed.

    >>> open_store("/ckpt/iter_0000100").location
    '/ckpt/iter_0000100'
    """
    text = os.fspath(path)
    if not text:
        raise StorageError(
            "'': an empty path names no checkpoint directory. Give its path, or '.' for this one."
        )
    if is_object_url(text):
        return ObjectStore(text, options=objects)
    if not isinstance(path, str) and _JOINED.match(text):
        raise StorageError(
            f"{text}: a pathlib.Path makes one slash of the two in an URL. Give the URL as a string.",
            path=text,
        )
    url = _URL.match(text)
    if url:
        raise StorageError(
            f"{text}: there is no store for {url['scheme']}:// locations, but for s3://. Mount it as "
            "a directory and give that path (a local path is given without a scheme), or pass an object with "
            "the methods of megackpt.storage.Store.",
            path=text,
        )
    return LocalStore(text)
