"""Stores that are only looked at: another store, with some of its files replaced by what is computed.

Owns what such views have in common; what they show instead is up to those who make them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import NoReturn

from megackpt.errors import StorageError
from megackpt.storage.error_translation import too_large
from megackpt.storage.store import Store, StreamWriter


class ReadOnlyView:
    """A `Store` that shows another one and refuses every change. Override what is to be shown differently.

    Closing a view leaves the store that it shows open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def location(self) -> str:
        """That of the store."""
        return self._store.location

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        nbytes = self.size(name)
        if nbytes > max_bytes:
            raise too_large(f"{self.location}/{name}", nbytes, max_bytes)
        data = bytearray(nbytes)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on."""
        self._store.read_into(name, offset_bytes, out)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._store.size(name)

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return self._store.exists(name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        return self._store.names(prefix)

    def create(self) -> None:
        """Refuse."""
        self._raise_read_only()

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Refuse."""
        self._raise_read_only()

    def write(self, name: str, data: bytes) -> None:
        """Refuse."""
        self._raise_read_only()

    def replace(self, name: str, data: bytes) -> None:
        """Refuse."""
        self._raise_read_only()

    def delete(self, names: Iterable[str]) -> None:
        """Refuse."""
        self._raise_read_only()

    def sync(self) -> None:
        """Nothing to do: nothing was changed."""

    def close(self) -> None:
        """Nothing to do."""

    def _raise_read_only(self) -> NoReturn:
        error = StorageError(f"{self.location}: this view of it is only read.", path=self.location)
        error.errno = errno.EROFS
        raise error
