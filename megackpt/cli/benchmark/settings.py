"""What is measured, and with what."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.errors import DeclarationError
from megackpt.options import LoadOptions
from megackpt.storage import FileOptions

PEERS = ("dcp", "mcore", "torch")
"""Names of other libraries that can save the same state. A peer from elsewhere is given as `module:class`."""

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that parameters may have."""

CASES = ("save", "load", "reshard", "async", "digests", "memory", "small", "plan", "long", "scaling")
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
        peers: libraries to compare with: names of PEERS, or `module:class` of a `Contender` that ranks can
            import. formats: which of our formats take part, the native one always; None for all that can be
            saved. cases: what to measure, names of CASES. scaling: how many ranks are compared with one,
            each time with the same state; under torchrun all. long_run: how many saves and loads the case
            `long` makes. profile: where to write a trace of one save and one load, as JSON for Perfetto;
            None for none. quiet: no progress on stderr.
    """

    directory: str
    ranks: int = 4
    size: int = 2 << 30
    dtype: str = "bfloat16"
    repeats: int = 5
    peers: tuple[str, ...] = ()
    formats: tuple[str, ...] | None = None
    cases: tuple[str, ...] = CASES
    scaling: int = 8
    long_run: int = 50
    profile: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "scaling"):
            count = getattr(self, name)
            if count < 1 or (count > 1 and count % 2):
                raise DeclarationError(f"{name} is {count}; give 1 or an even number, to have TP halved.")
        if self.repeats < 1:
            raise DeclarationError(f"repeats is {self.repeats}; give at least 1.")
        if self.long_run < 3:
            raise DeclarationError(f"long_run is {self.long_run}; give at least 3, to see a slope.")
        if self.size < 1 << 20:
            raise DeclarationError(f"size is {self.size} bytes; give at least 1 MiB.")
        if self.dtype not in DTYPES:
            raise DeclarationError(f"dtype={self.dtype!r} is not known. Give one of {', '.join(DTYPES)}.")
        if not self.cases:
            raise DeclarationError(f"No case is given. Known are {', '.join(CASES)}.")
        _check_known("peer", tuple(name for name in self.peers if ":" not in name), PEERS)
        _check_known("case", self.cases, CASES)


def _check_known(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DeclarationError(f"{unknown[0]!r} is no {what}. Known are {', '.join(known)}.")
