"""Ranges of files in memory that belongs to the store.

Owns how a caller that only looks at bytes, or copies them on, gets them without a buffer of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from megackpt.storage.buffers import BUFFER_BYTES, COMMON_POOL
from megackpt.storage.rawio import ALIGNMENT
from megackpt.storage.store import Store

MAX_BORROWED_BYTES = BUFFER_BYTES - 2 * ALIGNMENT
"""The longest range that can be lent: one buffer, less what alignment may cost at both ends."""


class Lends(Protocol):
    """What a `Store` also has if it reads into buffers of its own."""

    def lend(self, name: str, offset_bytes: int, nbytes: int) -> AbstractContextManager[memoryview]:
        """Yield a range of a file, at most LENT_BYTES, valid until the end of the block.

        Raises:
            FormatError: the file ends before.
        """


def check_lendable(path: str, offset_bytes: int, nbytes: int) -> None:
    """Refuse a range that no buffer can hold: a slice of a buffer would be shorter, without a word.

    Raises:
        ValueError: it is longer than LENT_BYTES, or begins before the file.
    """
    if offset_bytes < 0 or not 0 <= nbytes <= MAX_BORROWED_BYTES:
        raise ValueError(
            f"{path}: {nbytes} bytes from {offset_bytes} on cannot be lent; ask for at most "
            f"{MAX_BORROWED_BYTES} from a position in the file, or read into memory of your own."
        )


@contextlib.contextmanager
def lend(store: Store, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of a file, at most LENT_BYTES, valid until the end of the block. Any store will do.

    Raises:
        FormatError: the file ends before.
        StorageError: the store refused.
    """
    lend_own = getattr(store, "lend", None)  # isinstance with a protocol takes as long as a short read
    if lend_own is not None:
        with lend_own(name, offset_bytes, nbytes) as data:
            yield data
        return
    check_lendable(f"{store.location}/{name}", offset_bytes, nbytes)
    with COMMON_POOL.lend() as buffer:
        data = buffer.data[:nbytes]
        store.read_into(name, offset_bytes, data)
        yield data
