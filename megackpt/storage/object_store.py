"""A store below a prefix of an object store: S3, and what speaks its protocol.

Owns which requests each operation makes. How a client is set up, and what its failures mean, is in
`object_library`; how a stream is uploaded in `object_upload`.

An object is there completely or not at all, and what a request has acknowledged is durable and seen by every
later request (S3 promises so): nothing needs a rename or a flush, and a commit is one put.
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
from megackpt.storage.error_translation import ends_early, too_large
from megackpt.storage.lending import check_lendable
from megackpt.storage.object_client import (
    ObjectOptions,
    checked_url,
    obstore,
    open_client,
    repeating,
)
from megackpt.storage.object_refusal import translated_object_errors
from megackpt.storage.object_upload import ObjectWriter
from megackpt.storage.store import check_name, is_allowed_name

T = TypeVar("T")


class ObjectStore:
    """Objects below an URL, `s3://bucket/prefix`. A `Store`; see there for what each method does.

    Unlike in a directory, `a` and `a/b` can both be files. Credentials and the endpoint come from the
    environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL;
    roles of instances and containers) or from `options.config`. gs:// and az:// are passed to the library and
    untested.
    """

    def __init__(self, url: str, *, options: ObjectOptions | None = None) -> None:
        self._url = checked_url(url)
        self._options = options or ObjectOptions()
        self._client = open_client(self._url, self._options)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of: the process that writes asynchronous saves opens its own client."""
        return partial(type(self), options=self._options), (self._url,)

    @property
    def location(self) -> str:
        """The URL, without a slash at its end."""
        return self._url

    def create(self) -> None:
        """Do nothing: the bucket must exist, and prefixes need no making."""

    def open_writer(self, name: str, nbytes: int) -> ObjectWriter:
        """Start a new object of exactly `nbytes` bytes; what has that name stays until it is complete."""
        path = self._checked(name)
        if nbytes < 0:
            raise ValueError(f"{path}: nbytes is {nbytes}; a file has at least 0 bytes.")
        return ObjectWriter(self._client, name, nbytes, path=path, options=self._options)

    def write(self, name: str, data: bytes) -> None:
        """Put an object: one request."""
        self._ask("write", name, lambda: obstore().put(self._client, name, data, use_multipart=False))

    def replace(self, name: str, data: bytes) -> None:
        """Put an object: one request, which is atomic by nature."""
        self.write(name, data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole object: one request."""

        def get() -> bytes:
            found = obstore().get(self._client, name)
            if found.meta["size"] > max_bytes:
                raise too_large(self._path(name), found.meta["size"], max_bytes)
            return bytes(found.bytes())

        return self._ask("open", name, get)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on; a long one by several requests at a time."""
        if offset_bytes < 0:
            raise ValueError(f"{self._path(name)}: offset_bytes is {offset_bytes}; it cannot be negative.")
        if not out.nbytes:
            self.size(name)  # refuses what is missing
            return
        target, step = np.frombuffer(out, np.uint8), self._options.range_bytes

        def fetch(start: int) -> None:
            piece = target[start : start + step]
            np.copyto(piece, np.frombuffer(self._fetch(name, offset_bytes + start, piece.size), np.uint8))

        if target.size <= step:
            fetch(0)
            return
        # All are waited for, also after a failure: nothing may write into `out` when this returns.
        futures = [self._readers().submit(fetch, start) for start in range(0, target.size, step)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def lend(self, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of an object in memory of the library; see `Lends`."""
        check_lendable(self._path(name), offset_bytes, nbytes)
        yield memoryview(self._fetch(name, offset_bytes, nbytes)) if nbytes else memoryview(b"")

    def size(self, name: str) -> int:
        """Return the size in bytes: one request."""
        return self._ask("look up", name, lambda: int(obstore().head(self._client, name)["size"]))

    def exists(self, name: str) -> bool:
        """Tell whether there is such an object: one request."""
        try:
            self.size(name)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted: one request for each 1,000 in its directory."""
        found = [one["path"] for one in self._listed(prefix)]
        return sorted(name for name in found if name.startswith(prefix) and is_allowed_name(name))

    def entries(self) -> list[tuple[str, int, float]]:
        """Return name, bytes and time of each object, in seconds since 1970 by the store's clock."""
        return [(one["path"], one["size"], one["last_modified"].timestamp()) for one in self._listed("")]

    def last_modified(self) -> float | None:
        """Return when the newest object was put, in seconds since 1970 by the store's clock; or None."""
        return max((one["last_modified"].timestamp() for one in self._listed("")), default=None)

    def _listed(self, prefix: str) -> list[Any]:
        """Return what the library tells of each object in the directory of a prefix."""
        directory = prefix.rpartition("/")[0]

        def collect() -> list[Any]:
            batches = obstore().list(self._client, directory or None, chunk_size=1000)
            return [one for batch in batches for one in batch]

        with translated_object_errors("list", self._path(prefix)):
            return repeating(collect, self._options)

    def directories(self) -> list[str]:
        """Return the first parts of names that have several, sorted: one request for each 1,000."""
        with translated_object_errors("list", self._url):
            found = repeating(lambda: obstore().list_with_delimiter(self._client), self._options)
        return sorted(found["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects: one request for each 1,000, in this order."""
        todo = list(dict.fromkeys(names))
        for name in todo:
            self._checked(name)
        for start in range(0, len(todo), 1000):
            self._ask(
                "delete", todo[start], partial(obstore().delete, self._client, todo[start : start + 1000])
            )

    def sync(self) -> None:
        """Do nothing: what was acknowledged is durable."""

    def close(self) -> None:
        """End the threads of long reads. Connections are closed by the library when they are idle."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _fetch(self, name: str, start: int, nbytes: int) -> Any:
        """Return bytes of an object as a buffer: one request.

        Raises:
            FormatError: the object ends before.
        """
        try:
            data = self._ask(
                "read", name, lambda: obstore().get_range(self._client, name, start=start, length=nbytes)
            )
        except StorageError:
            self._refuse_short(name, start, nbytes)
            raise
        if len(data) != nbytes:
            self._refuse_short(name, start, nbytes)
            raise StorageError(
                f"{self._path(name)}: {len(data):,} of {nbytes:,} bytes came. Try again.",
                path=self._path(name),
            )
        return data

    def _refuse_short(self, name: str, start: int, nbytes: int) -> None:
        with contextlib.suppress(StorageError):
            end = self.size(name)
            if end < start + nbytes:
                raise ends_early(self._path(name), end, start, nbytes)

    def _readers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                count = self._options.ranges_in_flight
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="megackpt-range")
            return self._threads

    def _ask(self, action: str, name: str, request: Callable[[], T]) -> T:
        """Make an idempotent request, again where it may help."""
        with translated_object_errors(action, self._checked(name)):
            return repeating(request, self._options)

    def _checked(self, name: str) -> str:
        check_name(name, location=self._url)
        return self._path(name)

    def _path(self, name: str) -> str:
        return f"{self._url}/{name}"
