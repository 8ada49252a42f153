"""Raw I/O: how fast the directory is for the same bytes, files and threads, without a checkpoint.

Each rank writes and reads one file, around the page cache and through it. A rank that needs more than its
own file reads on in the files of the next ranks. So all bytes are read about equally often, as in a
resharded load.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megackpt.cli.benchmark.settings import READ_THREADS, WRITE_THREADS
from megackpt.engine.data.workers import useful_threads
from megackpt.storage.rawio import reserve

REQUEST_BYTES = 4 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class _Request:
    """One request to the system: a position in an open file, and the memory that is written or read."""

    descriptor: int
    offset_bytes: int
    memory: memoryview

    def write(self) -> int:
        return os.pwrite(self.descriptor, self.memory, self.offset_bytes)

    def read(self) -> int:
        return os.preadv(self.descriptor, [self.memory], self.offset_bytes)


class RawFiles:
    """One file per rank below root, of equal sizes: the whole size over ranks, padded to whole pages."""

    def __init__(self, root: Path, nbytes: int, *, rank: int, ranks: int) -> None:
        self.root, self.rank, self.ranks = root, rank, ranks
        self.nbytes = _padded(-(-nbytes // ranks))
        self._memory = memoryview(mmap.mmap(-1, self.nbytes))
        generator = torch.Generator().manual_seed(0)
        content = torch.frombuffer(self._memory, dtype=torch.int64)
        content.random_(generator=generator)

    def write(self, *, direct: bool) -> None:
        """Write this rank's file anew, durably; its room is reserved first, as by a writer of known size.

        Raises:
            OSError: the file system has no direct I/O.
        """
        self.root.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        descriptor = os.open(self._path(self.rank), flags, 0o644)
        try:
            reserve(descriptor, self.nbytes)
            _perform(_Request.write, self._requests(descriptor, self.nbytes), threads=WRITE_THREADS)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, nbytes: int | None = None, *, direct: bool, is_cached: bool = False) -> None:
        """Read so many bytes, by default those of this rank's file, from its beginning on.

        Cached files are read by fewer threads where there are fewer processors, as loads are.

        Raises:
            OSError: the file system has no direct I/O.
        """
        left = self.nbytes if nbytes is None else _padded(nbytes)
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        opened: list[int] = []
        requests: list[_Request] = []
        try:
            while left > 0:
                opened.append(os.open(self._path((self.rank + len(opened)) % self.ranks), flags))
                requests += self._requests(opened[-1], min(left, self.nbytes))
                left -= self.nbytes
            _perform(_Request.read, requests, threads=useful_threads(READ_THREADS, waits=not is_cached))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _path(self, rank: int) -> Path:
        return self.root / f"rank-{rank}"

    def _requests(self, descriptor: int, nbytes: int) -> Iterator[_Request]:
        for at in range(0, nbytes, REQUEST_BYTES):
            yield _Request(descriptor, at, self._memory[at : min(at + REQUEST_BYTES, nbytes)])


def _perform(move: Callable[[_Request], int], requests: Iterable[_Request], *, threads: int) -> None:
    def transfer(request: _Request) -> None:
        count = move(request)
        if count != len(request.memory):
            raise OSError(f"{count} of {len(request.memory)} bytes at {request.offset_bytes} were moved")

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(transfer, request) for request in requests]:
            done.result()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
