"""Views of other stores: forwarded, under a prefix, read-only, or with some bytes replaced.

A view copies nothing. All of them use the defaults of `Store` (`borrow`, `stream_into`, ...). These call the
methods that the view defines, so they return the same bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from megackpt.errors import StorageError
from megackpt.storage.error_translation import large_file_error, short_file_error
from megackpt.storage.store import Store, StreamWriter, check_name


class ForwardingStore(Store):
    """Forwards the abstract methods of `Store` to another store, or to an object that has these methods."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def location(self) -> str:
        """That of the inner store."""
        return self._inner.location

    def create(self) -> None:
        """Make the inner store ready."""
        self._inner.create()

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file."""
        return self._inner.open_writer(self._inner_name(name), nbytes)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._inner.write(self._inner_name(name), data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, atomically."""
        self._inner.replace(self._inner_name(name), data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        return self._inner.read(self._inner_name(name), max_bytes=max_bytes)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`."""
        self._inner.read_into(self._inner_name(name), offset_bytes, out)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._inner.size(self._inner_name(name))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        return self._inner.exists(self._inner_name(name))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        return self._inner.names(prefix)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""
        self._inner.delete([self._inner_name(name) for name in names])

    def sync(self) -> None:
        """Make names durable."""
        self._inner.sync()

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _inner_name(self, name: str) -> str:
        """Return the name of a file in the inner store; by default it is the same."""
        return name


class PrefixStore(ForwardingStore):
    """The files in a directory of another store, by their names in that directory.

    >>> from megackpt.storage import MemoryStore
    >>> store = MemoryStore()
    >>> PrefixStore(store, "iter_0000100").write("a", b"1")
    >>> store.names()
    ['iter_0000100/a']
    """

    def __init__(self, inner: Store, directory: str) -> None:
        check_name(directory, location=inner.location)
        super().__init__(inner)
        self._prefix = f"{directory}/"

    @property
    def location(self) -> str:
        """That of the inner store, and the directory."""
        return f"{self._inner.location}/{self._prefix[:-1]}"

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        return [name.removeprefix(self._prefix) for name in super().names(self._prefix + prefix)]

    def close(self) -> None:
        """Leave the inner store open; others use it, too."""

    def _inner_name(self, name: str) -> str:
        check_name(name, location=self.location)  # or a name with '..' could lead out of the directory
        return self._prefix + name


class ReadOnlyView(ForwardingStore):
    """A view of another store that rejects every change. Subclasses override what they show differently.

    If a view is closed, the store itself stays open.
    """

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file, as the other methods of the view show it."""
        nbytes = self.size(name)
        if nbytes > max_bytes:
            raise large_file_error(f"{self.location}/{name}", nbytes, max_bytes)
        data = bytearray(nbytes)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def create(self) -> None:
        """Raise an error."""
        self._raise_read_only()

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Raise an error."""
        self._raise_read_only()

    def write(self, name: str, data: bytes) -> None:
        """Raise an error."""
        self._raise_read_only()

    def replace(self, name: str, data: bytes) -> None:
        """Raise an error."""
        self._raise_read_only()

    def delete(self, names: Iterable[str]) -> None:
        """Raise an error."""
        self._raise_read_only()

    def sync(self) -> None:
        """Do nothing: nothing was changed."""

    def close(self) -> None:
        """Do nothing."""

    def _raise_read_only(self) -> NoReturn:
        error = StorageError(
            f"{self.location}: this view of the store is read-only. Open the store itself to change it.",
            path=self.location,
        )
        error.errno = errno.EROFS
        raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Ranges of a file that come from a file of another store.

    Attributes:
        nbytes: length of the patched file.
        source: the other store.
        name: the file there; each byte has the same position in both files.
        ranges: half-open, ascending, without overlap. The bytes between them are those of the file itself.
    """

    nbytes: int
    source: Store
    name: str
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(end for start_stop in self.ranges for end in start_stop), self.nbytes]
        if ends != sorted(ends):
            raise ValueError(
                f"{self.name}: ranges {self.ranges} are not in order within {self.nbytes} bytes."
            )

    @classmethod
    def whole(cls, source: Store, name: str, nbytes: int) -> Patch:
        """Return a patch of all bytes of a file."""
        return cls(nbytes=nbytes, source=source, name=name, ranges=((0, nbytes),))


class PatchedStore(ReadOnlyView):
    """A view of a store with patches over some of its files, which need not exist."""

    def __init__(self, store: Store, patches: Mapping[str, Patch]) -> None:
        super().__init__(store)
        self._patches = dict(patches)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files, patched ones among them."""
        patched = (name for name in self._patches if name.startswith(prefix))
        return sorted({*super().names(prefix), *patched})

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        check_name(name, location=self.location)
        return name in self._patches or super().exists(name)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._patches[name].nbytes if name in self._patches else super().size(name)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on: patched ranges from their source, the others from the store."""
        patch = self._patches.get(name)
        if patch is None or not out.nbytes:
            super().read_into(name, offset_bytes, out)
            return
        view = out.cast("B")
        if offset_bytes + len(view) > patch.nbytes:
            raise short_file_error(f"{self.location}/{name}", patch.nbytes, offset_bytes, len(view))
        for start, stop, is_patched in _cut_at_patches(patch, offset_bytes, offset_bytes + len(view)):
            part = view[start - offset_bytes : stop - offset_bytes]
            if is_patched:
                patch.source.read_into(patch.name, start, part)
            else:
                super().read_into(name, start, part)


def _cut_at_patches(patch: Patch, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Cut the range [start, stop) where patched bytes begin or end; yield start, stop, whether patched."""
    position = start
    for low, high in patch.ranges:
        low, high = max(low, position), min(high, stop)
        if low >= high:
            continue
        if position < low:
            yield position, low, False
        yield low, high, True
        position = high
    if position < stop:
        yield position, stop, False
