"""What is measured, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megackpt.errors import DeclarationError
from megackpt.options import LoadOptions
from megackpt.storage import FileOptions

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that parameters may have."""

CASES = ("save", "load", "reshard")
"""What can be measured, in order. `save` and `load` are one case: a load needs a checkpoint."""

WRITE_THREADS = FileOptions().threads
READ_THREADS = LoadOptions().threads
"""Threads of one rank. Ours are the defaults; raw I/O has as many."""

PEER_ROUNDS = 3
"""Rounds that peers take part in at most, in cases that would take too long otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """One run of the benchmark.

    Attributes:
        directory: where checkpoints are written, below a directory of their own that is removed at the end.
        ranks: how many ranks; 1 or even. With 1 nothing is resharded.
        size: bytes of the whole state, about.
        dtype: dtype of parameters; their masters and moments are float32.
        repeats: measured runs, after one that does not count; fewer where a case says so.
        formats: which of our formats take part, the native one always; None for all that can be saved.
        cases: what to measure, names of `known_cases`.
        quiet: no progress on stderr.
    """

    known_cases: ClassVar[tuple[str, ...]] = CASES

    directory: str
    ranks: int = 4
    size: int = 2 << 30
    dtype: str = "bfloat16"
    repeats: int = 5
    formats: tuple[str, ...] | None = None
    cases: tuple[str, ...] = CASES
    quiet: bool = False

    def __post_init__(self) -> None:
        check_even("ranks", self.ranks)
        if self.repeats < 1:
            raise DeclarationError(f"repeats is {self.repeats}; give at least 1.")
        if self.size < 1 << 20:
            raise DeclarationError(f"size is {self.size} bytes; give at least 1 MiB.")
        if self.dtype not in DTYPES:
            raise DeclarationError(f"dtype={self.dtype!r} is not known. Give one of {', '.join(DTYPES)}.")
        if not self.cases:
            raise DeclarationError(f"No case is given. Known are {', '.join(self.known_cases)}.")
        check_known("case", self.cases, self.known_cases)


def check_even(name: str, count: int) -> None:
    """Raise a DeclarationError for a number of ranks whose TP cannot be halved."""
    if count < 1 or (count > 1 and count % 2):
        raise DeclarationError(f"{name} is {count}; give 1 or an even number, to have TP halved.")


def check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a DeclarationError that lists what is known, for a name that is not."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DeclarationError(f"{unknown[0]!r} is no {what}. Known are {', '.join(known)}.")
