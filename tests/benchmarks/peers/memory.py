"""Memory beyond the state itself that a save and a load take, and what many in a row leave behind."""

from __future__ import annotations

import contextlib
import gc
from functools import partial

import numpy as np

from megackpt.cli.benchmark.measure import largest
from megackpt.cli.benchmark.report import LOAD_WARM, OURS, SAVE
from megackpt.cli.benchmark.state import (
    GridLayout,
    fingerprints,
    first_difference,
    make_model,
    make_state,
    spoil,
)
from megackpt.run.checkpointer import Checkpointer
from tests.benchmarks.peers.counters import open_descriptors, peak_above, resident_bytes
from tests.benchmarks.peers.names import DESCRIPTORS, MEMORY, SLOPE
from tests.benchmarks.peers.run import PeerRun

_PEER_ROUNDS = 1  # what counts is the highest
_MIB = 1 << 20


def measure_memory(run: PeerRun) -> None:
    """Measure the peak of resident memory over what it was before. Collective."""
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


_MOST_BYTES = 128 << 20  # of the state: what is lost with each save does not depend on it
_SETTLING = 0.2  # share of the runs that is left out: they allocate memory that later ones use again
_CASE = "long run"


def measure_long_run(run: PeerRun) -> None:
    """Save and load with Checkpointers, synchronous and asynchronous in turn. Collective."""
    model = make_model(min(run.settings.size, _MOST_BYTES), ranks=run.ranks, dtype=run.dtype)
    state = make_state(model, GridLayout(tp=run.ranks), run.rank, run.dtype)
    expected = fingerprints(state)
    resident: list[int] = []
    descriptors: list[int] = []
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(Checkpointer(run.root / f"long-{is_async}", keep_last=2, async_save=is_async))
            for is_async in (False, True)
        ]
        for step in range(run.settings.long_run):
            checkpointer = both[step % 2]
            checkpointer.save(step, run.native.declare(state))
            checkpointer.wait()
            spoil(state)
            checkpointer.load(run.native.declare(state))
            resident.append(resident_bytes() or 0)
            descriptors.append(open_descriptors() or 0)
            run.results.verify((_CASE,), OURS, first_difference(state, expected))
    run.clear()
    settled = min(max(2, int(_SETTLING * len(resident))), len(resident) - 2)
    left = descriptors[-1] - descriptors[settled]
    run.note(SLOPE, OURS, largest(_slope(resident[settled:])) / (1 << 20), "MiB a save")
    run.note(DESCRIPTORS, OURS, largest(left))


def _slope(values: list[int]) -> float:
    """Slope of the line that fits best, per value."""
    return float(np.polyfit(np.arange(len(values)), np.array(values, np.float64), 1)[0])
