"""The other libraries, by name, with the number of writing threads that is fastest for each of them here.

Which number is best depends on the machine and the file system. So each peer tries a few numbers before
anything is measured, and keeps the fastest.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megackpt.bench.contender import Contender
from megackpt.bench.state import GridLayout, make_model, make_state
from megackpt.errors import DeclarationError

if TYPE_CHECKING:
    from megackpt.bench.measure import BenchRun

_TRIAL_BYTES = 512 << 20  # at most; large enough that starting threads or processes does not decide
_TRIALS = 3  # of which the first does not count


def make_peer(name: str) -> Contender:
    """Return the contender of a name of PEERS, or an instance of the class that `module:class` names.

    Raises:
        MissingExtraError: its library is not installed.
        DeclarationError: there is no such module or class.
    """
    if ":" in name:
        return _import_class(name)()
    if name == "dcp":
        from megackpt.bench.dcp import TorchDistributed

        return TorchDistributed()
    if name == "mcore":
        from megackpt.bench.megatron import MegatronCore

        return MegatronCore()
    from megackpt.bench.plain_torch import PlainTorch

    return PlainTorch()


def check_peers(names: Sequence[str]) -> None:
    """Raise an error for a peer given as `module:class` that cannot be imported.

    Raises:
        DeclarationError: there is no such module or class.
    """
    for name in names:
        if ":" in name:
            _import_class(name)


def _import_class(name: str) -> Callable[[], Contender]:
    module, _, attribute = name.partition(":")
    try:
        peer: Callable[[], Contender] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(
            f"The peer {name!r} cannot be imported: {error}. Give `module:class`, with the module on "
            f"PYTHONPATH."
        ) from error
    return peer


def settle_threads(run: BenchRun) -> dict[str, str]:
    """Let each peer that can be given a number of threads try some. Collective.

    Return what was kept, in words, by peer.
    """
    kept: dict[str, str] = {}
    size = min(run.settings.size, _TRIAL_BYTES)
    model = make_model(size, ranks=run.ranks, dtype=run.dtype)
    source = make_state(model, GridLayout(tp=run.ranks), run.rank, run.dtype)
    for peer in run.peers:
        seconds: dict[int, float] = {}
        for threads in peer.thread_counts:
            peer.threads = threads
            runs = [run.save(peer, source) for _ in range(_TRIALS)]
            seconds[threads] = statistics.median(runs[1:])
        if seconds:
            peer.threads = min(seconds, key=lambda threads: seconds[threads])
            tried = ", ".join(f"{threads}: {spent:.3f} s" for threads, spent in seconds.items())
            kept[peer.name] = f"{peer.threads} threads (a save with {tried})"
    run.clear()
    return kept
