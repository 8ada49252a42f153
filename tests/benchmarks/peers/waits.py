"""Waits of training: for an asynchronous save, until it is durable, and for all but the bytes of a save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megackpt.cli.benchmark.measure import timed
from megackpt.cli.benchmark.settings import PEER_ROUNDS
from megackpt.cli.benchmark.state import (
    GridLayout,
    RankState,
    fingerprints,
    first_difference,
    make_state,
    spoil,
    state_nbytes,
)
from tests.benchmarks.peers.contenders import AsyncContender, OursAsync
from tests.benchmarks.peers.names import ASYNC_STALL, ASYNC_TOTAL, SMALL_LOAD, SMALL_SAVE
from tests.benchmarks.peers.run import PeerRun
from tests.benchmarks.peers.states import invert, make_small_model


def measure_async(run: PeerRun) -> None:
    """Save asynchronously, change the state at once, and look at what was saved. Collective."""
    layout = GridLayout(tp=run.ranks)
    source, target = run.state(layout), run.state(layout, filled=False)
    expected = fingerprints(source)
    ours = OursAsync(run.native.backend)
    able: list[AsyncContender] = [ours, *(peer for peer in run.peers if peer.can_save_async)]
    for contender in run.turns(able, peer_rounds=PEER_ROUNDS):
        _save_async(run, contender, source, target, expected)
        if contender is not ours:  # whose Checkpointer removes old steps itself
            run.fresh(contender.name)
    ours.close()
    run.clear()


def _save_async(
    run: PeerRun, contender: AsyncContender, source: RankState, target: RankState, expected: Sequence[str]
) -> None:
    directory = run.fresh(contender.name)
    declared = contender.declare(source)
    waits: list[Callable[[], Path]] = []
    stalls: list[float] = []
    written: list[Path] = []

    def save_and_train() -> None:
        stalls.append(timed(lambda: waits.append(contender.save_async(declared, directory))))
        invert(source)  # as training would change it: what is saved must be a copy
        written.append(waits[0]())

    # By one clock: a save goes on while the state changes.
    total = timed(save_and_train)
    run.results.add(ASYNC_STALL, contender.name, stalls[0], 0)  # bytes a second would say nothing
    run.results.add(ASYNC_TOTAL, contender.name, total, run.nbytes)
    invert(source)
    spoil(target)
    contender.load(contender.declare(target), written[0])
    run.results.verify((ASYNC_STALL, ASYNC_TOTAL), contender.name, first_difference(target, expected))


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
