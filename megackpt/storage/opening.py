"""Finds the store for a path, a URL, or an object that a user gives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
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
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/*)(?P<rest>.*)", re.DOTALL)

_OTHER_SPELLINGS = {
    "s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az", "wasb": "az",
    "wasbs": "az", "adl": "az",
}  # fmt: skip
"""Schemes of other programs, and ours for the same stores."""

_MOUNTS = {"file": "/", "dbfs": "/dbfs/"}
"""Schemes of files that a machine has as a directory, with that directory."""

_KNOWN = {*OBJECT_SCHEMES, *_OTHER_SPELLINGS, *_MOUNTS, "hdfs", "hf", "http", "https", "memory"}
"""Schemes that are meant as such also without a slash, as in `s3:bucket/run`."""


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
    match = _SCHEME.match(text)
    if match is not None and (match["slashes"] or match["scheme"].lower() in _KNOWN):
        raise _scheme_error(text, match["scheme"], match["slashes"], match["rest"])
    return expanded_path(text)


def _scheme_error(text: str, scheme: str, slashes: str, rest: str) -> StorageError:
    """Return the error for a text that begins as a URL, and is none that a store serves."""
    name = scheme.lower()
    name = _OTHER_SPELLINGS.get(name, name)
    is_known = name in OBJECT_SCHEMES or name in _stores_of_packages()
    known = ", ".join(f"{own}://" for own in ("s3", *sorted(_stores_of_packages())))
    what = f"there is no store for {scheme}:// locations; there are stores for {known}"
    if is_known and scheme == name:
        what = "a URL has two slashes, and a pathlib.Path makes one of them"
    if is_known:
        # `abfss://container@account/prefix` also names the account.
        container, _, prefix = rest.partition("/")
        rest = f"{container.partition('@')[0]}/{prefix}" if name == "az" else rest
        advice = f"Give {f'{name}://{rest}'!r} as a string"
    elif name in _MOUNTS:
        advice = f"Give the path, {_MOUNTS[name] + rest!r}"
    elif name == "hf":
        advice = "Get the folder by `hf download REPO --local-dir DIR`, and give that"
    else:
        advice = (
            "Mount the location as a directory and give the path (without a scheme), pass an object with the "
            "methods of megackpt.storage.Store, or install a package that has a store for it (entry point "
            f"group {ENTRY_POINTS})"
        )
    directory = "" if slashes.startswith("//") else f"; for a directory of this name, {'./' + text!r}"
    return StorageError(f"{text}: {what}. {advice}{directory}.", path=text)


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
    # A state dict is long, and most likely the arguments are in the wrong order.
    is_state = isinstance(location, Mapping)
    shown = f"a {type(location).__name__}" if is_state else repr(location)
    order = " The state comes first: save(state, path), load(state, path)." if is_state else ""
    return DeclarationError(
        f"{shown} is not a location of a checkpoint. Give a path, a URL as text, or an object with the "
        f"methods of megackpt.storage.Store.{order}"
    )
