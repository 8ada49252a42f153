"""The cases: each module measures one thing, for every contender that can do it."""

from __future__ import annotations

from collections.abc import Callable

from megackpt.bench.cases.asynchronous import measure_async
from megackpt.bench.cases.digests import measure_digests
from megackpt.bench.cases.long_run import measure_long_run
from megackpt.bench.cases.memory import measure_memory
from megackpt.bench.cases.planning import measure_planning
from megackpt.bench.cases.reshard import measure_reshard
from megackpt.bench.cases.same_layout import measure_same_layout
from megackpt.bench.cases.scaling import measure_scaling
from megackpt.bench.cases.small import measure_small
from megackpt.bench.measure import BenchRun

CASES: dict[str, Callable[[BenchRun], None]] = {
    "save": measure_same_layout,
    "load": measure_same_layout,
    "reshard": measure_reshard,
    "async": measure_async,
    "digests": measure_digests,
    "memory": measure_memory,
    "small": measure_small,
    "plan": measure_planning,
    "long": measure_long_run,
    "scaling": measure_scaling,
}
"""What to call for a name of `settings.CASES`, in order; collective."""
