"""What the place can do: the same bytes, files and threads with nothing in between.

Owns plain writing and reading of one file per rank, around the page cache and through it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch

from megackpt.bench.settings import READ_THREADS, WRITE_THREADS
from megackpt.storage.rawio import reserve

PIECE_BYTES = 4 << 20
_ALIGNMENT = 4096
Move: TypeAlias = Callable[[int, memoryview], int]  # offset, memory -> how many bytes were moved


class RawFile:
    """One rank's file of a given size, padded to whole pages, and page-aligned memory for it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = memoryview(mmap.mmap(-1, self.nbytes))
        generator = torch.Generator().manual_seed(0)
        content = torch.frombuffer(self._memory, dtype=torch.int64)
        content.random_(generator=generator)

    def write(self, *, direct: bool) -> None:
        """Write the file anew, durably; the room is reserved first, as a writer of known size does.

        Raises:
            OSError: the file system has no direct I/O.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        descriptor = os.open(self.path, flags, 0o644)
        try:
            reserve(descriptor, self.nbytes)
            self._in_pieces(lambda at, piece: os.pwrite(descriptor, piece, at), WRITE_THREADS)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, *, direct: bool) -> None:
        """Read the file into memory.

        Raises:
            OSError: the file system has no direct I/O.
        """
        descriptor = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            self._in_pieces(lambda at, piece: os.preadv(descriptor, [piece], at), READ_THREADS)
        finally:
            os.close(descriptor)

    def _in_pieces(self, move: Move, threads: int) -> None:
        def one(at: int) -> None:
            piece = self._memory[at : at + PIECE_BYTES]
            count = move(at, piece)
            if count != len(piece):
                raise OSError(f"{self.path}: {count} of {len(piece)} bytes at {at} were moved")

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(one, at) for at in range(0, self.nbytes, PIECE_BYTES)]:
                done.result()
