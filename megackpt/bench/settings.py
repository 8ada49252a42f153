"""What is measured, and with what."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.errors import DeclarationError
from megackpt.options import LoadOptions
from megackpt.storage import FileOptions

PEERS = ("dcp", "mcore", "torch")
"""Other libraries that the same state can be saved with."""

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that parameters may have."""

WRITE_THREADS = FileOptions().threads
READ_THREADS = LoadOptions().threads
"""Threads of one rank. Ours are the defaults; raw I/O has as many, and peers where they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """One run of the benchmark.

    Attributes:
        directory: where checkpoints are written, below a directory of their own that is removed at the end.
        ranks: how many ranks; 1 or even. With 1 nothing is resharded.
        size: bytes of the whole state, about.
        dtype: dtype of parameters; their masters and moments are float32.
        repeats: measured runs, after one that does not count.
        peers: with whom to compare, names of PEERS.
        profile: where to write a trace of one save and one load, as JSON for Perfetto; None for none.
    """

    directory: str
    ranks: int = 4
    size: int = 2 << 30
    dtype: str = "bfloat16"
    repeats: int = 5
    peers: tuple[str, ...] = ()
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or (self.ranks > 1 and self.ranks % 2):
            raise DeclarationError(f"ranks is {self.ranks}; give 1 or an even number, to have TP halved.")
        if self.repeats < 1:
            raise DeclarationError(f"repeats is {self.repeats}; give at least 1.")
        if self.size < 1 << 20:
            raise DeclarationError(f"size is {self.size} bytes; give at least 1 MiB.")
        if self.dtype not in DTYPES:
            raise DeclarationError(f"dtype={self.dtype!r} is not known. Give one of {', '.join(DTYPES)}.")
        unknown = [peer for peer in self.peers if peer not in PEERS]
        if unknown:
            raise DeclarationError(f"{unknown[0]!r} is no peer. Known are {', '.join(PEERS)}.")
