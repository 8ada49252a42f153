"""A store under a prefix of an object store: S3, and services with the same protocol.

This module makes the requests of each operation; `object_client` makes the client and translates its errors;
`object_upload` uploads files.

An object is visible completely or not at all. When a request is acknowledged, its effect is durable, and
every later request sees it (S3 promises this). So nothing needs a rename or a flush, and a commit is one
put.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from megackpt.errors import StorageError
from megackpt.storage.error_translation import large_file_error, short_file_error
from megackpt.storage.object_client import (
    checked_url,
    obstore,
    open_client,
    translated_object_errors,
    with_retries,
)
from megackpt.storage.object_upload import ObjectWriter
from megackpt.storage.options import ObjectOptions
from megackpt.storage.store import Store, check_borrowed_range, check_name, is_allowed_name

T = TypeVar("T")


class ObjectStore(Store):
    """The objects under a URL, `s3://bucket/prefix`.

    Unlike in a directory, `a` and `a/b` can both be files. Credentials and the endpoint come from the
    environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL;
    roles of instances and containers) or from `options.config`. gs:// and az:// are passed to the library and
    untested.
    """

    replaces_on_close = True

    def __init__(self, url: str, *, options: ObjectOptions | None = None) -> None:
        self._url = checked_url(url)
        self._options = options or ObjectOptions()
        self._client = open_client(self._url, self._options)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: the process that writes asynchronous saves opens its own client."""
        return partial(type(self), options=self._options), (self._url,)

    @property
    def location(self) -> str:
        """The URL, without a slash at its end."""
        return self._url

    def create(self) -> None:
        """Do nothing: the bucket must exist, and a prefix exists as soon as an object has it."""

    def open_writer(self, name: str, nbytes: int) -> ObjectWriter:
        """Start a new object of exactly `nbytes` bytes; an older one stays until this one is complete."""
        path = self._checked_path(name)
        if nbytes < 0:
            raise ValueError(f"{path}: nbytes is {nbytes}; a file has at least 0 bytes.")
        return ObjectWriter(self._client, name, nbytes, path=path, options=self._options)

    def write(self, name: str, data: bytes) -> None:
        """Put an object: one request."""
        self._request("write", name, lambda: obstore().put(self._client, name, data, use_multipart=False))

    def replace(self, name: str, data: bytes) -> None:
        """Put an object: one request, which is atomic."""
        self.write(name, data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole object: one request."""

        def get() -> bytes:
            answer = obstore().get(self._client, name)
            if answer.meta["size"] > max_bytes:
                raise large_file_error(self._path(name), answer.meta["size"], max_bytes)
            return bytes(answer.bytes())

        return self._request("open", name, get)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on. A long range is read by several requests at a time."""
        if offset_bytes < 0:
            raise ValueError(f"{self._path(name)}: offset_bytes is {offset_bytes}; it cannot be negative.")
        if not out.nbytes:
            self.size(name)  # raises an error if there is no such object
            return
        target, step = np.frombuffer(out, np.uint8), self._options.range_bytes

        def fetch(start: int) -> None:
            part = target[start : start + step]
            np.copyto(part, np.frombuffer(self._fetch(name, offset_bytes + start, part.size), np.uint8))

        if target.size <= step:
            fetch(0)
            return
        # Wait for all requests, also after a failure: no thread may write into `out` when this returns.
        futures = [self._range_threads().submit(fetch, start) for start in range(0, target.size, step)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def borrow(self, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of an object, in memory that the library has allocated: one request."""
        check_borrowed_range(self._path(name), offset_bytes, nbytes)
        yield memoryview(self._fetch(name, offset_bytes, nbytes)) if nbytes else memoryview(b"")

    def size(self, name: str) -> int:
        """Return the size in bytes: one request."""
        return self._request("look up", name, lambda: int(obstore().head(self._client, name)["size"]))

    def exists(self, name: str) -> bool:
        """Return whether there is such an object: one request."""
        try:
            self.size(name)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted: one request per 1,000 in its directory."""
        listed = [meta["path"] for meta in self._list(prefix)]
        return sorted(name for name in listed if name.startswith(prefix) and is_allowed_name(name))

    def entries(self) -> list[tuple[str, int, float]]:
        """Return name, size in bytes and time of each object, in seconds since 1970 by the store's clock."""
        return [(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in self._list("")]

    def last_modified(self) -> float | None:
        """Return the time of the newest object, in seconds since 1970 by the store's clock; None if empty."""
        return max((meta["last_modified"].timestamp() for meta in self._list("")), default=None)

    def _list(self, prefix: str) -> list[Any]:
        """Return the library's metadata of each object in the directory of a prefix."""
        # The library lists whole directories only; the callers select names by the rest of the prefix.
        directory = prefix.rpartition("/")[0]

        def collect() -> list[Any]:
            batches = obstore().list(self._client, directory or None, chunk_size=1000)
            return [meta for batch in batches for meta in batch]

        with translated_object_errors("list", self._path(prefix)):
            return with_retries(collect, self._options)

    def directories(self) -> list[str]:
        """Return the top directories: first parts of names with several parts. One request per 1,000."""
        with translated_object_errors("list", self._url):
            listing = with_retries(lambda: obstore().list_with_delimiter(self._client), self._options)
        return sorted(listing["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects: one request per 1,000, in this order."""
        keys = list(dict.fromkeys(names))
        for name in keys:  # all names, before the first request removes anything
            self._checked_path(name)
        for start in range(0, len(keys), 1000):
            self._request(
                "delete", keys[start], partial(obstore().delete, self._client, keys[start : start + 1000])
            )

    def sync(self) -> None:
        """Do nothing: every acknowledged request is durable."""

    def close(self) -> None:
        """End the threads of long reads. The library closes connections when they are idle."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:  # without the lock: this waits for reads
            threads.shutdown()

    def _fetch(self, name: str, start: int, nbytes: int) -> Any:
        """Return bytes of an object as a buffer: one request.

        Raises:
            FormatError: the object ends before the range does.
        """
        # Stores answer a range beyond the end with an error or with fewer bytes. Ask for the size only then.
        try:
            data = self._request(
                "read", name, lambda: obstore().get_range(self._client, name, start=start, length=nbytes)
            )
        except StorageError:
            self._check_long_enough(name, start, nbytes)
            raise
        if len(data) != nbytes:
            self._check_long_enough(name, start, nbytes)
            raise StorageError(
                f"{self._path(name)}: received {len(data):,} of {nbytes:,} bytes: the transfer was cut off. "
                f"Try again.",
                path=self._path(name),
            )
        return data

    def _check_long_enough(self, name: str, start: int, nbytes: int) -> None:
        """Raise FormatError if the object ends before a range does; do nothing if its size is unknown."""
        with contextlib.suppress(StorageError):
            end = self.size(name)
            if end < start + nbytes:
                raise short_file_error(self._path(name), end, start, nbytes)

    def _range_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                count = self._options.ranges_in_flight
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="megackpt-range")
            return self._threads

    def _request(self, action: str, name: str, request: Callable[[], T]) -> T:
        """Return the result of an idempotent request; repeat it after a temporary failure."""
        with translated_object_errors(action, self._checked_path(name)):
            return with_retries(request, self._options)

    def _checked_path(self, name: str) -> str:
        check_name(name, location=self._url)
        return self._path(name)

    def _path(self, name: str) -> str:
        return f"{self._url}/{name}"
