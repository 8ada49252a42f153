"""Which store serves a path.

Owns the one decision of how a user's path or URL maps to a kind of store.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from megackpt.errors import CheckpointError, DeclarationError, StorageError
from megackpt.storage.local import LocalStore
from megackpt.storage.paths import SCHEMES, expanded_path, is_object_url
from megackpt.storage.store import Store

if TYPE_CHECKING:
    from megackpt.storage.object_client import ObjectOptions

ENTRY_POINTS = "megackpt.stores"
"""Entry points of other packages: by the scheme of its URLs, a function that returns the store of an URL."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_JOINED = re.compile(r"(s3|gs|az):/[^/]")


def open_store(path: str | os.PathLike[str], *, objects: ObjectOptions | None = None) -> Store:
    """Return the store for a checkpoint directory or the URL of one. Local; nothing is touched yet.

    objects are the options of an object store, if it is one.

    Raises:
        StorageError: `path` is an URL of a kind that no store serves, or empty.
        DeclarationError: it is no path.
        MissingExtraError: it is in an object store, and the library for those is not installed.

    >>> open_store("/ckpt/iter_0000100").location
    '/ckpt/iter_0000100'
    """
    text = checked_path(path)
    if is_object_url(text):
        from megackpt.storage.object_store import ObjectStore

        return ObjectStore(text, options=objects)
    return _store_of_package(text) if is_url(text) else LocalStore(text)


def is_url(text: str) -> bool:
    """Say whether a location is an URL, and no path. Local, pure."""
    return _URL.match(text) is not None


def checked_path(path: object) -> str:
    """Return a path, or the URL of a store, as text; `~` becomes the home directory. Local.

    Raises:
        StorageError: it is an URL of a kind that no store serves, or empty.
        DeclarationError: it is none of these.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise _no_place(path)
    if not text:
        raise StorageError(
            "'': an empty path names no checkpoint directory. Give its path, or '.' for this one."
        )
    url = _URL.match(text)
    if url and (is_object_url(text) or url["scheme"] in _packages()):
        return text
    if not isinstance(path, str) and _JOINED.match(text):
        raise StorageError(
            f"{text}: a pathlib.Path makes one slash of the two in an URL. Give the URL as a string.",
            path=text,
        )
    if url:
        known = ", ".join(f"{scheme}://" for scheme in ("s3", *sorted(_packages())))
        raise StorageError(
            f"{text}: there is no store for {url['scheme']}:// locations, but for {known}. Mount it as "
            "a directory and give that path (a local path is given without a scheme), pass an object with "
            "the methods of megackpt.storage.Store, or install a package with a store for them (entry point "
            f"group {ENTRY_POINTS}).",
            path=text,
        )
    return expanded_path(text)


@cache
def _packages() -> dict[str, EntryPoint]:
    """Entry points of stores by their schemes; those of object stores are ours."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in SCHEMES}


def _store_of_package(url: str) -> Store:
    point = _packages()[url.partition("://")[0]]
    try:
        return as_store(point.load()(url))
    except CheckpointError:
        raise
    except Exception as error:
        raise StorageError(
            f"{url}: the store for {point.name}:// of another package ({point.value}) cannot be opened: "
            f"{type(error).__name__}: {error}. Repair or update that package.",
            path=url,
        ) from error


def as_store(place: object) -> Store:
    """Return a store that was handed in. Local, pure.

    Raises:
        DeclarationError: it lacks what every use of a store begins with.
    """
    if not all(hasattr(place, name) for name in ("location", "exists", "read")):
        raise _no_place(place)
    return cast(Store, place)


def _no_place(given: object) -> DeclarationError:
    return DeclarationError(
        f"{given!r} is no place for a checkpoint. Give a path, an URL as text, or an object with the methods "
        f"of megackpt.storage.Store."
    )
