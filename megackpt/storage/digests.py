"""Digests of stored bytes: one per fixed block of large data, one for a small file.

Owns which hash is used and how data is cut into blocks. Who stores digests, and what happens when one
differs, is up to formats.

xxHash 3 finds bit rot, truncation and mixed-up bytes at memory speed; it does not resist someone who forges
data.
Source: the XXH3_64bits and XXH3_128bits functions of the xxHash specification, with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash


def block_digests(data: memoryview, block_bytes: int) -> npt.NDArray[np.uint64]:
    """Return the 64-bit digest of each block of `block_bytes` bytes, `[blocks]`.

    data is a C-contiguous buffer. The last block may be shorter; empty data has no blocks.

    >>> [hex(int(digest)) for digest in block_digests(memoryview(b"abcde"), 4)]
    ['0x6497a96f53a89890', '0xe5e72e5e3bec4a78']
    """
    return np.array(digest_list(data, block_bytes), np.uint64)


def digest_list(data: memoryview, block_bytes: int) -> list[int]:
    """Return the same as `block_digests` as Python's integers, which takes less time for few blocks."""
    if not data.nbytes:
        return []
    view = memoryview(data).cast("B")
    if len(view) <= block_bytes:
        return [xxhash.xxh3_64_intdigest(view)]
    return [xxhash.xxh3_64_intdigest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes)]


def digest_of(data: bytes) -> str:
    """Return the 128-bit digest of a small file as 32 hexadecimal digits, most significant first."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_parts(pieces: Iterable[memoryview]) -> str:
    """Like `digest_of`, for the bytes of a file that come one piece after the other."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    hexdigest: str = digest.hexdigest()
    return hexdigest


class FileDigester:
    """Like `digest_of`, for the bytes of a file that come one piece after the other, as they come."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(piece)

    def result(self) -> str:
        """Return the digest of the bytes so far."""
        digest: str = self._digest.hexdigest()
        return digest


class BlockDigester:
    """Like `block_digests`, for bytes that arrive in pieces of any size. Copies nothing. For one thread.

    It may digest several pieces of data one after the other, each with blocks of its own; see `end`.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes is {block_bytes}; a block has at least one byte.")
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0  # how much of the current block was seen; always less than a block

    def update(self, data: memoryview) -> None:
        """Take the next bytes: a C-contiguous buffer of any element type."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        start = 0
        if self._open_bytes:
            start = min(self._block_bytes - self._open_bytes, len(view))
            self._continue_block(view[:start])
        whole = start + (len(view) - start) // self._block_bytes * self._block_bytes
        for offset in range(start, whole, self._block_bytes):
            self._done.append(xxhash.xxh3_64_intdigest(view[offset : offset + self._block_bytes]))
        if whole < len(view):
            self._continue_block(view[whole:])

    def end(self) -> None:
        """End the block that is open, if one is: the next bytes begin another, as those of other data do."""
        if self._open_bytes:
            self._close_block()

    def result(self) -> npt.NDArray[np.uint64]:
        """Return the digests of the blocks so far, `[blocks]`, an unfinished one included."""
        unfinished = [self._open.intdigest()] if self._open_bytes else []
        return np.array(self._done + unfinished, dtype=np.uint64)

    def _continue_block(self, piece: memoryview) -> None:
        self._open.update(piece)
        self._open_bytes += len(piece)
        if self._open_bytes == self._block_bytes:
            self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._open.intdigest())
        self._open.reset()
        self._open_bytes = 0
