"""How long training waits for an asynchronous save, and when that save is durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megackpt.bench.contender import Contender
from megackpt.bench.measure import Measuring
from megackpt.bench.names import BEHIND, STALL
from megackpt.bench.settings import PEER_ROUNDS
from megackpt.bench.state import GridLayout, RankState, fingerprints, first_difference, invert, spoil
from megackpt.bench.stopwatch import timed


def measure_behind(measuring: Measuring) -> None:
    """Save asynchronously, change the state at once, and look at what was saved. Collective."""
    layout = GridLayout(tp=measuring.ranks)
    source, target = measuring.state(layout), measuring.state(layout, filled=False)
    expected = fingerprints(source)
    able = [one for one in measuring.leaders if one.can_save_behind]
    for one in measuring.turns(able, peer_rounds=PEER_ROUNDS):
        _save_behind(measuring, one, source, target, expected)
        if one is not measuring.native:  # whose Checkpointer removes old steps itself
            measuring.fresh(one.name)
    measuring.native.close()
    measuring.clear()


def _save_behind(
    measuring: Measuring, one: Contender, source: RankState, target: RankState, expected: Sequence[str]
) -> None:
    directory = measuring.fresh(one.name)
    declared = one.declare(source)
    waits: list[Callable[[], Path]] = []
    stall = timed(lambda: waits.append(one.save_behind(declared, directory)))
    invert(source)  # as training would change it: what is saved must be a copy
    written: list[Path] = []
    rest = timed(lambda: written.append(waits[0]()))
    measuring.results.add(STALL, one.name, stall, measuring.nbytes)
    measuring.results.add(BEHIND, one.name, stall + rest, measuring.nbytes)
    invert(source)
    spoil(target)
    one.load(one.declare(target), written[0])
    measuring.results.verify((STALL, BEHIND), one.name, first_difference(target, expected))
