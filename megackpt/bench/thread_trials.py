"""Finds the number of writing threads that is fastest for each peer.

It depends on the machine and the file system. So each peer tries a few numbers before anything is measured,
and keeps the fastest.
"""

from __future__ import annotations

import statistics

from megackpt.bench.measure import BenchRun
from megackpt.bench.state import GridLayout, make_model, make_state

_TRIAL_BYTES = 512 << 20  # at most; large enough that starting threads or processes does not decide
_TRIALS = 3  # of which the first does not count


def settle_threads(run: BenchRun) -> dict[str, str]:
    """Choose the number of threads of each peer that has a choice. Collective.

    Returns:
        The choice and the times of all trials, as text, by peer.
    """
    choices: dict[str, str] = {}
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
            choices[peer.name] = f"{peer.threads} threads (a save with {tried})"
    run.clear()
    return choices
