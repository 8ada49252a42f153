"""Memory that a save and a load take beyond the state itself, on the rank that takes most."""

from __future__ import annotations

import gc
from functools import partial

from megackpt.cli.benchmark.measure import largest
from megackpt.cli.benchmark.report import LOAD_WARM, SAVE
from megackpt.cli.benchmark.state import GridLayout, fingerprints, first_difference, spoil
from tests.benchmarks.peers.counters import peak_above
from tests.benchmarks.peers.names import MEMORY
from tests.benchmarks.peers.run import PeerRun

_PEER_ROUNDS = 1  # what counts is the highest
_MIB = 1 << 20


def measure_memory(run: PeerRun) -> None:
    """Measure the peak of resident memory over what it was before. Collective.

    Pages of files that are mapped count as memory of the process; processes that it starts do not.
    """
    layout = GridLayout(tp=run.ranks)
    state = run.state(layout)
    expected = fingerprints(state)
    highest: dict[tuple[str, str], int] = {}
    for contender in run.turns(run.leaders, rounds=min(2, run.settings.repeats), peer_rounds=_PEER_ROUNDS):
        gc.collect()  # what another contender has left must not be freed meanwhile
        directory = run.fresh(contender.name)
        saving = int(largest(peak_above(partial(contender.save, contender.declare(state), directory))))
        spoil(state)
        loading = int(largest(peak_above(partial(contender.load, contender.declare(state), directory))))
        run.results.verify((MEMORY,), contender.name, first_difference(state, expected))
        if run.results.counts:
            for case, peak in ((SAVE, saving), (LOAD_WARM, loading)):
                highest[case, contender.name] = max(highest.get((case, contender.name), 0), peak)
        run.clear()
    for (case, who), peak in sorted(highest.items()):
        run.note(f"{MEMORY}, {case.split(',')[0]}", who, peak / _MIB, "MiB")
