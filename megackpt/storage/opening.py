"""Finds the store for a path, a URL, or an object that a user gives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias, cast

from megackpt.errors import CheckpointError, DeclarationError, StorageError
from megackpt.storage.local import LocalStore, expanded_path
from megackpt.storage.options import OBJECT_SCHEMES, ObjectOptions
from megackpt.storage.store import Store

ENTRY_POINTS = "megackpt.stores"
"""Entry points of other packages: the name is the scheme of URLs, the value a function from URL to store."""

Location: TypeAlias = str | os.PathLike[str] | Store
"""What users give for a checkpoint: a path, a URL as text, or an open store."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
# Not with one letter, as of a drive. `str(Path("s3://bucket/run"))` gives one slash.
_URL_WITH_ONE_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?!/)(?P<rest>.*)", re.DOTALL)


def open_store(path: str | os.PathLike[str], *, objects: ObjectOptions | None = None) -> Store:
    """Return the store for a checkpoint directory or the URL of one. Local; no file is touched yet.

    Args:
        path: a path, or a URL of an object store or of another package's store.
        objects: options of an object store; ignored by other stores.

    Raises:
        StorageError: no store serves URLs of this kind, or `path` is empty.
        DeclarationError: `path` is not a path.
        MissingExtraError: `path` is a URL of an object store, and the library for these is not installed.

    >>> open_store("/ckpt/iter_0000100").location
    '/ckpt/iter_0000100'
    """
    text = checked_path(path)
    if is_object_url(text):
        from megackpt.storage.object_store import ObjectStore

        return ObjectStore(text, options=objects)
    return _open_store_of_package(text) if is_url(text) else LocalStore(text)


@contextmanager
def opened_store(location: Location) -> Iterator[Store]:
    """Open the store of a location for a block of code; a store that is passed in stays open. Local.

    Raises:
        StorageError, DeclarationError, MissingExtraError: as `open_store` and `as_store`.
    """
    if isinstance(location, (str, os.PathLike)):
        with closing(open_store(location)) as store:
            yield store
    else:
        yield as_store(location)


def is_url(text: str) -> bool:
    """Return whether a location is a URL and not a path. Local, pure."""
    return _URL.match(text) is not None


def is_object_url(text: str) -> bool:
    """Return whether a location is a URL of an object store. Local, pure."""
    return text.partition("://")[0] in OBJECT_SCHEMES and "://" in text


def checked_path(path: object) -> str:
    """Return a path, or the URL of a store, as text; `~` becomes the home directory. Local.

    Raises:
        StorageError: no store serves URLs of this kind, or `path` is empty.
        DeclarationError: `path` is neither a path nor a URL.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise _location_error(path)
    if not text:
        raise StorageError(
            "'': an empty path names no checkpoint directory. Give its path, or '.' for this one."
        )
    url = _URL.match(text)
    if url and (is_object_url(text) or url["scheme"] in _stores_of_packages()):
        return text
    if (one_slash := _URL_WITH_ONE_SLASH.match(text)) is not None:
        scheme, rest = one_slash["scheme"], one_slash["rest"]
        raise StorageError(
            f"{text}: a URL has two slashes, and a pathlib.Path makes one of them. Give "
            f"{scheme + '://' + rest!r} as a string; for a directory of this name, {'./' + text!r}.",
            path=text,
        )
    if url:
        known = ", ".join(f"{scheme}://" for scheme in ("s3", *sorted(_stores_of_packages())))
        raise StorageError(
            f"{text}: there is no store for {url['scheme']}:// locations; there are stores for {known}. "
            "Mount the location as a directory and give the path (without a scheme), pass an object with the "
            "methods of megackpt.storage.Store, or install a package that has a store for it (entry point "
            f"group {ENTRY_POINTS}).",
            path=text,
        )
    return expanded_path(text)


def as_store(location: object) -> Store:
    """Return the store for an object that a user gives instead of a path. Local, pure.

    An object that has the methods of a store without deriving from `Store` is wrapped.

    Raises:
        DeclarationError: the object lacks the methods that every use of a store needs.
    """
    if isinstance(location, Store):
        return location
    if not all(hasattr(location, name) for name in ("location", "exists", "read")):
        raise _location_error(location)
    from megackpt.storage.views import ForwardingStore

    return ForwardingStore(cast(Store, location))


@cache
def _stores_of_packages() -> dict[str, EntryPoint]:
    """Return entry points of stores by scheme. Object stores are always those of this package."""
    points = entry_points(group=ENTRY_POINTS)
    return {point.name: point for point in points if point.name not in OBJECT_SCHEMES}


def _open_store_of_package(url: str) -> Store:
    point = _stores_of_packages()[url.partition("://")[0]]
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


def _location_error(location: object) -> DeclarationError:
    return DeclarationError(
        f"{location!r} is not a location of a checkpoint. Give a path, a URL as text, or an object with the "
        f"methods of megackpt.storage.Store."
    )
