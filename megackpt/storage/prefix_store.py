"""A part of a store as a store of its own: the files whose names begin with a prefix.

Owns nothing but the names. What the store underneath can do beyond the protocol (move, lend) is not offered.
"""

from __future__ import annotations

from collections.abc import Iterable

from megackpt.storage.store import Store, StreamWriter, check_name


class PrefixStore:
    """The files below a directory of another store. A `Store`; see there for what each method does.

    >>> from megackpt.storage import MemoryStore
    >>> whole = MemoryStore()
    >>> StoreBelow(whole, "iter_0000100").write("a", b"1")
    >>> whole.names()
    ['iter_0000100/a']
    """

    def __init__(self, store: Store, directory: str) -> None:
        check_name(directory, location=store.location)
        self._store = store
        self._prefix = f"{directory}/"

    @property
    def location(self) -> str:
        """Where the other store is, and the directory."""
        return f"{self._store.location}/{self._prefix[:-1]}"

    def create(self) -> None:
        """Make the other store ready."""
        self._store.create()

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file."""
        return self._store.open_writer(self._full(name), nbytes)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._store.write(self._full(name), data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, atomically."""
        self._store.replace(self._full(name), data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        return self._store.read(self._full(name), max_bytes=max_bytes)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`."""
        self._store.read_into(self._full(name), offset_bytes, out)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._store.size(self._full(name))

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return self._store.exists(self._full(name))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        found = self._store.names(self._prefix + prefix)
        return [name.removeprefix(self._prefix) for name in found]

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""
        self._store.delete([self._full(name) for name in names])

    def sync(self) -> None:
        """Make names durable: all of the other store."""
        self._store.sync()

    def close(self) -> None:
        """Leave the other store open; it belongs to others, too."""

    def _full(self, name: str) -> str:
        check_name(name, location=self.location)  # or a name could lead to files beside the directory
        return self._prefix + name
