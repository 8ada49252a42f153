"""Many saves and loads in a row: whether memory grows, and whether anything stays open."""

from __future__ import annotations

import contextlib

import numpy as np

from megackpt.cli.benchmark.measure import largest
from megackpt.cli.benchmark.report import OURS
from megackpt.cli.benchmark.state import (
    GridLayout,
    fingerprints,
    first_difference,
    make_model,
    make_state,
    spoil,
)
from megackpt.run.checkpointer import Checkpointer
from tests.benchmarks.peers.counters import open_descriptors, resident_bytes
from tests.benchmarks.peers.names import DESCRIPTORS, SLOPE
from tests.benchmarks.peers.run import PeerRun

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
