"""A store that fails on command, to test what a save does when the disk does not play along.

It counts operations and raises an error, or calls a hook, at chosen ones. The store that it wraps does the
rest.

>>> from megackpt.storage import MemoryStore
>>> store = FaultyStore(MemoryStore(), fail_at=1)
>>> store.write("a", b"1")
>>> store.write("b", b"2")  # doctest: +ELLIPSIS
Traceback (most recent call last):
megackpt.errors.StorageError: memory:/b: cannot write: No space left on device (ENOSPC). ...
>>> [operation.kind for operation in store.operations], store.names()
(['write', 'write'], ['a'])
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from megackpt.errors import StorageError
from megackpt.storage import Store, StreamWriter
from megackpt.storage.error_translation import storage_error

_T = TypeVar("_T")

# The kinds of operations, by whether they change anything that lasts.
CHANGES = frozenset(
    {"create", "open_writer", "writer.write", "writer.close", "write", "replace", "delete", "move", "sync"}
)
READS = frozenset({"read", "read_into", "size", "exists", "names"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One counted call to the store or to one of its writers.

    Attributes:
        index: how many counted operations came before; from 0.
        kind: the method, "writer.write" and "writer.close" for those of writers.
        name: the file concerned, the prefix for "names", "" if there is none.
        nbytes: bytes to be written or read, 0 if unknown.
    """

    index: int
    kind: str
    name: str
    nbytes: int


def no_space() -> OSError:
    """Return what a full disk answers."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_error() -> OSError:
    """Return what a broken disk answers."""
    return OSError(errno.EIO, os.strerror(errno.EIO))


def access_denied() -> OSError:
    """Return what a disk with the wrong owner or mode answers."""
    return OSError(errno.EACCES, os.strerror(errno.EACCES))


class FaultyStore(Store):
    """Wraps `inner`; a `Store` itself. Safe for many threads as far as `inner` is.

    fail_at chooses the operations that fail: the one with this index, or those for which the function is
    true; None chooses none. kinds says which operations count. A chosen operation calls `hook` if there is
    one; the hook may kill the process. Without a hook, the operation raises the StorageError that a real
    store would make of `error()`. This comes before anything is done, or with `after` when all is done.

    Attributes:
        operations: the counted operations so far, in order.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | Callable[[Operation], bool] | None = None,
        error: Callable[[], OSError] = no_space,
        hook: Callable[[Operation], None] | None = None,
        kinds: Collection[str] = CHANGES,
        after: bool = False,
    ) -> None:
        self.operations: list[Operation] = []
        self._inner = inner
        self._fail_at = fail_at
        self._error = error
        self._hook = hook
        self._kinds = kinds
        self._after = after
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        """That of the inner store."""
        return self._inner.location

    @property
    def moves_atomically(self) -> bool:
        """Whether the inner store does."""
        return self._inner.moves_atomically

    @property
    def replaces_on_close(self) -> bool:
        """Whether the inner store does."""
        return self._inner.replaces_on_close

    def create(self) -> None:
        """Create the inner store."""
        self.perform("create", "", 0, self._inner.create)

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file; the writer's calls count, too."""
        writer = self.perform("open_writer", name, nbytes, lambda: self._inner.open_writer(name, nbytes))
        return _FaultyWriter(self, writer, name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self.perform("write", name, len(data), lambda: self._inner.write(name, data))

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small file."""
        self.perform("replace", name, len(data), lambda: self._inner.replace(name, data))

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        return self.perform("read", name, 0, lambda: self._inner.read(name, max_bytes=max_bytes))

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`."""
        self.perform("read_into", name, out.nbytes, lambda: self._inner.read_into(name, offset_bytes, out))

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self.perform("size", name, 0, lambda: self._inner.size(name))

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return self.perform("exists", name, 0, lambda: self._inner.exists(name))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`."""
        return self.perform("names", prefix, 0, lambda: self._inner.names(prefix))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; each one counts, so that a test can stop between two."""
        for name in names:
            self.perform("delete", name, 0, lambda name=name: self._inner.delete([name]))  # type: ignore[misc]

    def move(self, name: str, target: str) -> None:
        """Rename a file."""
        self.perform("move", name, 0, lambda: self._inner.move(name, target))

    def sync(self) -> None:
        """Make names durable."""
        self.perform("sync", "", 0, self._inner.sync)

    def close(self) -> None:
        """Close the inner store. Never fails and does not count."""
        self._inner.close()

    def perform(self, kind: str, name: str, nbytes: int, action: Callable[[], _T]) -> _T:
        """Count one operation and carry it out, or fail as configured.

        Raises:
            StorageError: this is a chosen operation, or `action` raised it.
        """
        if kind not in self._kinds:
            return action()
        with self._lock:
            operation = Operation(index=len(self.operations), kind=kind, name=name, nbytes=nbytes)
            self.operations.append(operation)
        if not self._is_chosen(operation):
            return action()
        if not self._after:
            self._strike(operation)
        result = action()
        if self._after:
            self._strike(operation)
        return result

    def _is_chosen(self, operation: Operation) -> bool:
        if callable(self._fail_at):
            return self._fail_at(operation)
        return operation.index == self._fail_at

    def _strike(self, operation: Operation) -> None:
        if self._hook is not None:
            self._hook(operation)
            return
        error = self._error()
        if isinstance(error, StorageError):
            raise error
        path = f"{self.location}/{operation.name}" if operation.name else self.location
        action = operation.kind.replace("writer.", "").replace("_", " ")
        raise storage_error(error, action=action, path=path, nbytes=operation.nbytes) from error


class _FaultyWriter:
    """A writer whose calls count in its store; a failed one ends like that of a real store, file removed."""

    def __init__(self, store: FaultyStore, inner: StreamWriter, name: str) -> None:
        self._store = store
        self._inner = inner
        self._name = name
        self._closed = False

    def write(self, data: memoryview) -> None:
        nbytes = memoryview(data).nbytes
        self._store.perform("writer.write", self._name, nbytes, lambda: self._inner.write(data))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._store.perform("writer.close", self._name, 0, self._inner.close)
        except BaseException as error:
            self._inner.__exit__(type(error), error, error.__traceback__)
            raise

    def __enter__(self) -> _FaultyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._inner.__exit__(kind, error, trace)
