"""A small state: 200 arrays of 1 KiB, equal on all ranks. What is measured is everything but the bytes."""

from __future__ import annotations

import torch

from megackpt.cli.benchmark.state import GridLayout, fingerprints, make_small_model, make_state, state_nbytes
from tests.benchmarks.peers.names import SMALL_LOAD, SMALL_SAVE
from tests.benchmarks.peers.run import PeerRun

_MORE = 3  # times the repeats: these runs are short, and vary


def measure_small(run: PeerRun) -> None:
    """Save, durably and committed, and load. Collective."""
    model = make_small_model()
    layout = GridLayout(dp=run.ranks)
    source = make_state(model, layout, run.rank, torch.float32)
    target = make_state(model, layout, run.rank, torch.float32, filled=False)
    expected = fingerprints(source)
    nbytes = state_nbytes(model, torch.float32)
    repeats = run.settings.repeats
    for contender in run.turns(run.leaders, rounds=_MORE * repeats, peer_rounds=2 * repeats):
        seconds = run.save(contender, source)
        run.results.add(SMALL_SAVE, contender.name, seconds, nbytes)
        run.load(contender, target, expected, SMALL_LOAD, saved=SMALL_SAVE)
    run.clear()
