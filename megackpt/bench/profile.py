"""One save and one load of ours, broken into phases.

The result is a JSON file for Perfetto and Chrome's tracing page, with one process per rank.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import megackpt.api as api
from megackpt.bench import page_cache
from megackpt.bench.ours import native
from megackpt.bench.state import GridLayout, spoil
from megackpt.bench.stopwatch import timed
from megackpt.bench.tracing import Tracer, traced_load, traced_store, traced_strategy
from megackpt.formats.registry import save_strategy
from megackpt.storage import Store, open_store

if TYPE_CHECKING:
    from megackpt.bench.measure import BenchRun

Phases = dict[str, list[dict[str, float]]]


def profile(run: BenchRun, path: Path) -> Phases:
    """Trace a save and a load, cold where that is possible; write the trace to path. Collective.

    Return seconds by "save" and "load", rank and phase, with "all" for the whole; those of phases are sums
    over threads.
    """
    layout = GridLayout(tp=run.ranks)
    state, declared = run.state(layout), native()
    directory = run.root / "profile"
    strategy = save_strategy(None)

    def save(tracer: Tracer, store: Store) -> None:
        api.save(declared.declare(state), store, traced_strategy(strategy, tracer))

    def load(tracer: Tracer, store: Store) -> None:
        with traced_load(tracer):
            api.load(declared.declare(state), store)

    phases_of_case: Phases = {}
    events: list[dict[str, Any]] = []
    for name, work in (("save", save), ("load", load)):
        store = open_store(directory)
        tracer = Tracer()
        seconds = timed(partial(work, tracer, traced_store(store, tracer)))
        store.close()
        own_phases = {"all": seconds, **tracer.seconds()}
        ranks: list[Any] = [None] * run.ranks
        dist.all_gather_object(ranks, (own_phases, _events(name, tracer, rank=run.rank)))
        phases_of_case[name] = [phases for phases, _ in ranks]
        events += [event for _, of_rank in ranks for event in of_rank]
        spoil(state)
        if run.rank == 0:
            page_cache.drop(directory)
    if run.rank == 0:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return phases_of_case


def _events(name: str, tracer: Tracer, *, rank: int) -> list[dict[str, Any]]:
    """Spans as complete events, in microseconds. Source: Trace Event Format, Chromium project."""
    lane = 0 if name == "save" else 1
    pid = 2 * rank + lane
    named: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{name}, rank {rank}"}}
    ]
    return named + [
        {
            "name": span.name,
            "ph": "X",
            "ts": span.start_s * 1e6,
            "dur": (span.stop_s - span.start_s) * 1e6,
            "pid": pid,
            "tid": span.thread,
        }
        for span in tracer.spans
    ]
