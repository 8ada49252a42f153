"""What digests cost: saves and loads with them and without, in turns.

The library cannot save without digests, so the hash function is replaced during such a save by one that
returns 0. Nobody loads what is saved like that. The time of the hash alone, on the bytes and threads of a
rank, is measured too: it is what digests would cost if nothing went on meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import numpy as np
import xxhash

import megackpt.storage.digests as digest
from megackpt.cli.benchmark.measure import all_true, timed
from megackpt.cli.benchmark.report import LOAD_COLD, LOAD_WARM, OURS, SAVE
from megackpt.cli.benchmark.settings import WRITE_THREADS
from megackpt.cli.benchmark.state import (
    GridLayout,
    RankState,
    as_bytes,
    fingerprints,
    first_difference,
    spoil,
)
from megackpt.options import LoadOptions
from megackpt.run.collective import load
from megackpt.storage import block_digests
from tests.benchmarks.peers.names import DIGESTS, DOUBT, HASH, UNCHECKED
from tests.benchmarks.peers.run import PeerRun

_BLOCK_BYTES = 4 << 20
_MORE = 2  # times the repeats: the difference is small compared with the noise


def measure_digests(run: PeerRun) -> None:
    """Measure what they add to a save, a cold and a warm load, in per cent. Collective."""
    layout = GridLayout(tp=run.ranks)
    state = run.state(layout)
    expected = fingerprints(state)
    run.save(run.native, state)  # what is loaded, each time
    hashing: list[float] = []
    for who in run.turns([OURS, UNCHECKED], rounds=_MORE * run.settings.repeats):
        _save(run, state, who)
        spent = timed(partial(_hash, state))
        if run.results.counts:
            hashing.append(spent)
        if run.drop(run.directory(OURS)):
            _load(run, state, LOAD_COLD, who)
        run.warm(OURS)
        _load(run, state, LOAD_WARM, who)
        run.results.verify((_name(LOAD_WARM),), who, first_difference(state, expected))
    run.clear()
    for case in (SAVE, LOAD_COLD, LOAD_WARM):
        _note_cost(run, case, statistics.median(hashing))


def _save(run: PeerRun, state: RankState, who: str) -> None:
    directory = run.fresh("unread")
    save = partial(run.native.save, run.native.declare(state), directory)
    if who == OURS:
        run.results.add(_name(SAVE), who, timed(save), run.nbytes)
        return
    with _no_digests() as hashes:
        seconds = timed(save)
    if all_true(hashes.calls > 0):
        run.results.add(_name(SAVE), who, seconds, run.nbytes)
    else:
        run.results.mark_unsupported(_name(SAVE), who, "the hash is not where it was: it cannot be left out")


def _load(run: PeerRun, state: RankState, case: str, who: str) -> None:
    spoil(state)
    options = LoadOptions(verify=who == OURS)
    declared = run.native.declare(state)
    seconds = timed(partial(load, declared, run.directory(OURS), options=options))
    run.results.add(_name(case), who, seconds, run.nbytes)


def _hash(state: RankState) -> None:
    with ThreadPoolExecutor(WRITE_THREADS) as pool:
        views = [as_bytes(shard.data).numpy().data for shard in state.shards]
        for done in [pool.submit(block_digests, view, _BLOCK_BYTES) for view in views]:
            done.result()


def _note_cost(run: PeerRun, case: str, hashing_s: float) -> None:
    """Compare runs in pairs, each of two that followed each other."""
    checked, unchecked = (run.row(_name(case), who).seconds for who in (OURS, UNCHECKED))
    if not checked or len(checked) != len(unchecked):
        return
    added = np.subtract(checked, unchecked) / statistics.median(unchecked)
    low, high = np.quantile(added, [0.25, 0.75])
    run.note(f"{DIGESTS}, {case}", OURS, 100 * float(np.median(added)), "%")
    # The error of a median of n values, from the middle half of them. Source: McGill et al. 1978, notches.
    doubt = 1.57 * float(high - low) / math.sqrt(len(added))
    run.note(f"{DIGESTS}, {case}{DOUBT}", OURS, 100 * doubt, "%")
    run.note(f"{HASH} {case}", OURS, 100 * hashing_s / statistics.median(checked), "%")


def _name(case: str) -> str:
    return f"digests: {case}"


class _NoHash:
    """Stands for the functions and objects of xxhash that digests of blocks use."""

    def __init__(self) -> None:
        self.calls = 0

    def xxh3_64(self) -> _NoHash:
        self.calls += 1
        return self

    def xxh3_64_intdigest(self, data: object) -> int:
        self.calls += 1
        return 0

    def update(self, data: object) -> None:
        self.calls += 1

    def intdigest(self) -> int:
        return 0

    def reset(self) -> None:
        self.calls += 1

    def __getattr__(self, name: str) -> object:
        return getattr(xxhash, name)


@contextlib.contextmanager
def _no_digests() -> Iterator[_NoHash]:
    hashes = _NoHash()
    with mock.patch.object(digest, "xxhash", hashes):
        yield hashes
