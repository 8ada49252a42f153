"""The other libraries, by name, at the settings that are best for them here.

Owns the choice of a peer's number of writing threads: which is best depends on the machine and the file
system, so each peer tries a few before anything is measured, and keeps the fastest.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from megackpt.bench.contender import Contender
from megackpt.bench.state import GridLayout, make_model, make_state

if TYPE_CHECKING:
    from megackpt.bench.measure import Measuring

_TRIAL_BYTES = 512 << 20  # at most; large enough that starting threads or processes does not decide
_TRIALS = 3  # of which the first does not count


def make_peer(name: str) -> Contender:
    """Return the contender of a name of PEERS.

    Raises:
        MissingExtraError: its library is not installed.
    """
    if name == "dcp":
        from megackpt.bench.dcp import TorchDistributed

        return TorchDistributed()
    if name == "mcore":
        from megackpt.bench.megatron import MegatronCore

        return MegatronCore()
    from megackpt.bench.plain_torch import PlainTorch

    return PlainTorch()


def settle_threads(measuring: Measuring) -> dict[str, str]:
    """Let each peer that can be given a number of threads try some. Collective.

    Return what was kept, in words, by peer.
    """
    kept: dict[str, str] = {}
    size = min(measuring.settings.size, _TRIAL_BYTES)
    model = make_model(size, ranks=measuring.ranks, dtype=measuring.dtype)
    source = make_state(model, GridLayout(tp=measuring.ranks), measuring.rank, measuring.dtype)
    for peer in measuring.peers:
        seconds: dict[int, float] = {}
        for threads in peer.thread_counts:
            peer.threads = threads
            runs = [measuring.save(peer, source) for _ in range(_TRIALS)]
            seconds[threads] = statistics.median(runs[1:])
        if seconds:
            peer.threads = min(seconds, key=lambda threads: seconds[threads])
            tried = ", ".join(f"{threads}: {spent:.3f} s" for threads, spent in seconds.items())
            kept[peer.name] = f"{peer.threads} threads (a save with {tried})"
    measuring.clear()
    return kept
