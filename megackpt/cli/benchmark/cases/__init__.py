"""The cases: each module measures one thing, for every contender that can do it."""

from __future__ import annotations

from collections.abc import Callable

from megackpt.cli.benchmark.cases.asynchronous import measure_async
from megackpt.cli.benchmark.cases.digests import measure_digests
from megackpt.cli.benchmark.cases.long_run import measure_long_run
from megackpt.cli.benchmark.cases.memory import measure_memory
from megackpt.cli.benchmark.cases.planning import measure_planning
from megackpt.cli.benchmark.cases.reshard import measure_reshard
from megackpt.cli.benchmark.cases.same_layout import measure_same_layout
from megackpt.cli.benchmark.cases.scaling import measure_scaling
from megackpt.cli.benchmark.cases.small import measure_small
from megackpt.cli.benchmark.measure import BenchRun

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
