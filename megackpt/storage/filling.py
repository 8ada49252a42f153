"""Ranges of files that are looked at while they come.

Owns how a caller that checks what it reads gets it piece by piece, each while it is still in the processor's
own cache: a digest of what has left it takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megackpt.storage.store import Store


class Fills(Protocol):
    """What a `Store` also has if it reads piece by piece."""

    def fill(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
        """Fill `out`, flat bytes, from front to back; yield now and then how many bytes of it are there.

        Raises:
            FormatError: the file ends before.
        """


def fill(store: Store, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
    """Fill `out`, flat bytes, from front to back; yield now and then how many bytes of it are there.

    Any store will do; at last all bytes are there.

    Raises:
        FormatError: the file ends before.
        StorageError: the store refused.
    """
    fill_own = getattr(store, "fill", None)  # isinstance with a protocol takes as long as a short read
    if fill_own is not None:
        yield from fill_own(name, offset_bytes, out)
        return
    store.read_into(name, offset_bytes, out)
    yield len(out)
