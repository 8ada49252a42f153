"""Digests of stored bytes: one per block of large data, one for a small file.

`formats` stores digests and compares them. xxHash 3 finds bit rot, truncation and mixed-up bytes at memory
speed; it does not detect data that somebody forged on purpose.
Source: the XXH3_64bits and XXH3_128bits functions of the xxHash specification, with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

FileDigester = xxhash.xxh3_128
"""Computes the digest (see `digest_of`) of a file whose parts arrive one after the other: `update(part)` adds
bytes, and `hexdigest()` returns the digest of the bytes so far."""


def block_digests(data: memoryview, block_bytes: int) -> npt.NDArray[np.uint64]:
    """Return the 64-bit digest of each block of `block_bytes` bytes, `[blocks]`.

    Args:
        data: a C-contiguous buffer.
        block_bytes: length of a block. The last one may be shorter; empty data has no blocks.

    >>> [hex(int(digest)) for digest in block_digests(memoryview(b"abcde"), 4)]
    ['0x6497a96f53a89890', '0xe5e72e5e3bec4a78']
    """
    return np.array(digest_list(data, block_bytes), np.uint64)


def digest_list(data: memoryview, block_bytes: int) -> list[int]:
    """Return what `block_digests` returns, as a list of ints. For few blocks this takes less time."""
    if not data.nbytes:
        return []
    view = memoryview(data).cast("B")
    if len(view) <= block_bytes:
        return [xxhash.xxh3_64_intdigest(view)]
    return [xxhash.xxh3_64_intdigest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes)]


def digest_of(data: bytes) -> str:
    """Return the 128-bit digest of a small file as 32 hexadecimal digits, most significant first."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_parts(parts: Iterable[memoryview]) -> str:
    """Return the digest (see `digest_of`) of a file that is given part by part."""
    digester = FileDigester()
    for part in parts:
        digester.update(part)
    return digester.hexdigest()


class BlockDigester:
    """Computes digests of blocks of bytes that arrive in parts of any size, without a copy. For one thread.

    One digester can digest several chunks one after the other, each with blocks of its own: call `end`
    between two chunks.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes is {block_bytes}; a block has at least one byte.")
        self._block_bytes = block_bytes
        self._digests: list[int] = []
        self._open_block = xxhash.xxh3_64()
        self._open_bytes = 0  # bytes of the open block so far; always less than a block

    def update(self, data: memoryview) -> None:
        """Add the next bytes: a C-contiguous buffer of any element type."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        # First the rest of the open block, then complete blocks in one call each, then the start of another.
        start = 0
        if self._open_bytes:
            start = min(self._block_bytes - self._open_bytes, len(view))
            self._continue_block(view[:start])
        stop = start + (len(view) - start) // self._block_bytes * self._block_bytes
        for offset in range(start, stop, self._block_bytes):
            self._digests.append(xxhash.xxh3_64_intdigest(view[offset : offset + self._block_bytes]))
        if stop < len(view):
            self._continue_block(view[stop:])

    def end(self) -> None:
        """End the open block, if there is one: the next bytes begin a new block."""
        if self._open_bytes:
            self._close_block()

    def result(self) -> npt.NDArray[np.uint64]:
        """Return the digests of the blocks so far, `[blocks]`, with that of the open block last."""
        unfinished = [self._open_block.intdigest()] if self._open_bytes else []
        return np.array(self._digests + unfinished, dtype=np.uint64)

    def _continue_block(self, part: memoryview) -> None:
        self._open_block.update(part)
        self._open_bytes += len(part)
        if self._open_bytes == self._block_bytes:
            self._close_block()

    def _close_block(self) -> None:
        self._digests.append(self._open_block.intdigest())
        self._open_block.reset()
        self._open_bytes = 0
