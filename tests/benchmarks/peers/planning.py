"""Planning of a save like the last one: how long it takes, and how many collectives it needs.

Runs the two steps of a save one after the other, with a plan cache, as `Checkpointer.save` does.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from megackpt.cli.benchmark.measure import largest, timed
from megackpt.cli.benchmark.report import OURS
from megackpt.cli.benchmark.state import GridLayout, RankState
from megackpt.comm import world_group
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.save import plan_save
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.saving.write import write_and_commit
from megackpt.options import SaveOptions
from megackpt.storage import open_store
from tests.benchmarks.peers.collectives import counted
from tests.benchmarks.peers.names import COLLECTIVES, COLLECTIVES_SAVE, PLAN_AGAIN, PLAN_FIRST
from tests.benchmarks.peers.run import PeerRun


@dataclass(frozen=True, slots=True)
class _Run:
    """One save."""

    planning_s: float  # until all ranks know what to write
    planning: int  # collectives until then
    saving: int  # collectives until the end


def measure_planning(run: PeerRun) -> None:
    """Save a state for the first time, then again and again. Collective."""
    state = run.state(GridLayout(tp=run.ranks))
    _save(run, state, PlanCache())  # opens what is opened once in a process
    plans = PlanCache()
    first = _save(run, state, plans)
    again = [_save(run, state, plans) for _ in range(run.settings.repeats)]
    run.clear()
    run.note(PLAN_FIRST, OURS, 1e3 * first.planning_s, "ms")
    run.note(PLAN_AGAIN, OURS, 1e3 * statistics.median(run.planning_s for run in again), "ms")
    run.note(COLLECTIVES, OURS, largest(again[-1].planning))
    run.note(COLLECTIVES_SAVE, OURS, largest(again[-1].saving))


def _save(run: PeerRun, state: RankState, plans: PlanCache) -> _Run:
    store = open_store(run.fresh(OURS))
    options = SaveOptions()
    group = world_group(timeout_s=options.timeout_s)
    request = SaveRequest(state=run.native.declare(state), options=options, plans=plans)
    planned: list[PlannedSave] = []
    during: list[int] = []
    with counted() as count:

        def plan() -> None:
            before = count.value
            planned.append(plan_save(request, store, group))
            during.append(count.value - before)

        seconds = timed(plan)
        before = count.value
        write_and_commit(planned[0], store, group)
        writing = count.value - before
    store.close()
    return _Run(seconds, during[0], during[0] + writing)
