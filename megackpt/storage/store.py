"""What a store of bytes must offer, and which names it takes.

Owns the two protocols that everything above storage is written against, and the one check of file names.
Where the bytes go is up to the stores (`local`, `memory`); what they mean is up to formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from megackpt.errors import StorageError


class StreamWriter(Protocol):
    """Appends to one new file, whose size was given when it was opened. Used by one thread at a time.

    A context manager: leaving the block closes the writer, leaving it by an exception removes the partial
    file.
    """

    def write(self, data: memoryview) -> None:
        """Append `data`, a C-contiguous buffer of any element type; it may be reused once this returns.

        Raises:
            StorageError: the store refused this write or, where writes go on in the background, an earlier
                one; or more bytes were given than the file was opened for.
        """
        ...

    def close(self) -> None:
        """Make the content durable. Closing twice is harmless. If it fails, the partial file is gone.

        Raises:
            StorageError: the store refused a write, or fewer bytes were written than the file was opened for.
        """
        ...

    def __enter__(self) -> StreamWriter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Store(Protocol):
    """A flat namespace of '/'-separated relative names under one checkpoint directory. Safe for many threads.

    Everything here is local: no rank waits for another. Every method raises StorageError if the store
    refuses, with the reason, the path and what to do; `errno` of the error is set where the system gave one.

    A store may have more, which loads then use instead of `read_into`: `lend` (see `Lends`) and `fill` (see
    `Fills`); and `is_cached(name)`, whether a file is in memory. Who derives from one overrides those, too.

    A file that was written under a name is not expected to change afterwards (`replace` is for the one that
    does), so a store may keep files open between reads; it notices changes that it made itself.

    Attributes:
        location: what to call this store in messages, a path or an URL.
    """

    @property
    def location(self) -> str:
        """What to call this store in messages, a path or an URL."""
        ...

    def create(self) -> None:
        """Make the store ready to be written to. One that exists already is left as it is.

        Durable after `sync` or `replace`.
        """
        ...

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file of exactly `nbytes` bytes, instead of what had that name before.

        The file may be visible before it is complete: give it a name that nothing refers to yet. Its content
        is durable when the writer is closed, its name after `sync`.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; its content is durable when this returns, its name after `sync`."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file so that readers, also after a crash, find the old bytes or the new ones.

        Never a mixture. Durable when it returns. This is how a checkpoint is committed.
        """
        ...

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file, as it is now.

        Raises:
            FormatError: the file is larger than `max_bytes`; nothing of it was read.
        """
        ...

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`, a writable C-contiguous buffer, with the bytes from `offset_bytes` on.

        Other threads may read and compute meanwhile.

        Raises:
            FormatError: the file ends before `out` is full.
        """
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def exists(self, name: str) -> bool:
        """Tell whether there is a file of this name."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files that begin with `prefix`, sorted; none before `create`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are missing already are fine. Durable after `sync`."""
        ...

    def sync(self) -> None:
        """Make the names of everything written and deleted through this object durable."""
        ...

    def close(self) -> None:
        """Let go of open files and buffers. Using the store again opens them again."""
        ...


def check_name(name: str, *, location: str) -> None:
    """Refuse a name that could mean a file outside the store, or that is no name on some system.

    Raises:
        StorageError: `name` is empty, absolute, has an empty, '.' or '..' part, a backslash, a NUL or a
            character that UTF-8 cannot write.

    >>> check_name("data/rank-00000.safetensors", location="/ckpt")
    """
    reason = _fault_of(name)
    if reason is not None:
        raise StorageError(
            f"{location}: the file name {name!r} {reason}, so it is refused. Names inside a checkpoint are "
            "relative, with parts joined by '/'. If it was read from a checkpoint, that checkpoint is "
            "damaged or forged.",
            path=location,
        )


def is_allowed_name(name: str) -> bool:
    """Tell whether `check_name` would let a name pass."""
    return _fault_of(name) is None


def _fault_of(name: str) -> str | None:
    if not name:
        return "is empty"
    if name.startswith("/"):
        return "is absolute"
    if "\0" in name:
        return "contains a NUL"
    if "\\" in name:
        return "contains a backslash"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
    return None
