"""Runs all cases with all contenders on the ranks of torchrun, or else on processes that it starts.

Before anything is measured, each peer tries a few numbers of writing threads and keeps the fastest, which
depends on the machine and the file system.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path

import torch.distributed as dist

from megackpt.cli.benchmark.cases import measure_reshard, measure_same_layout
from megackpt.cli.benchmark.report import Report
from megackpt.cli.benchmark.state import GridLayout, make_model, make_state
from megackpt.cli.benchmark.world import make_report, run_cases, run_ranks, silence_libraries
from tests.benchmarks.peers.contenders import check_peers
from tests.benchmarks.peers.digests import measure_digests
from tests.benchmarks.peers.memory import measure_long_run, measure_memory
from tests.benchmarks.peers.planning import measure_planning
from tests.benchmarks.peers.run import PeerReport, PeerRun, PeerSettings, fields_of
from tests.benchmarks.peers.scaling import measure_scaling
from tests.benchmarks.peers.tracing import profile
from tests.benchmarks.peers.waits import measure_async, measure_small

MEASURES: dict[str, Callable[[PeerRun], None]] = {
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
"""The function to call for a name of `run.CASES`, in order; collective."""

_SCALING = "scaling"
_TRIAL_BYTES = 512 << 20  # at most; large enough that starting threads or processes does not decide
_TRIALS = 3  # of which the first does not count


def run_peers(settings: PeerSettings) -> PeerReport | None:
    """Measure, and return what was found; None on ranks of torchrun other than 0."""
    check_peers(settings.peers)  # an unknown peer is an error before anything starts
    worlds = [settings] if "RANK" in os.environ and "WORLD_SIZE" in os.environ else _worlds(settings)
    measured = [values for world in worlds if (values := run_ranks(world, measure_all)) is not None]
    if not measured:
        return None
    report = reduce(joined, map(PeerReport.from_json, measured))
    return replace(report, command=asdict(settings) | {"ranks": report.command["ranks"]})


def _worlds(settings: PeerSettings) -> list[PeerSettings]:
    """Return the cases to measure for each world of processes."""
    if _SCALING not in settings.cases or settings.scaling == settings.ranks:
        return [settings]
    apart = replace(settings, cases=(_SCALING,), ranks=settings.scaling, peers=(), formats=())
    rest = tuple(case for case in settings.cases if case != _SCALING)
    return [replace(settings, cases=rest), replace(apart, profile=None)] if rest else [apart]


def joined(report: PeerReport, scaling: PeerReport) -> PeerReport:
    """Add what was measured in the world for scaling."""
    return replace(
        report,
        rows=report.rows + scaling.rows,
        figures=report.figures + scaling.figures,
        machine=report.machine
        | {
            "scaling_ranks": scaling.machine["scaling_ranks"],
            "spent_s": report.machine["spent_s"] | scaling.machine["spent_s"],
        },
    )


def measure_all(settings: PeerSettings, root: Path) -> Report | None:
    """Measure the cases on one rank; return the report on rank 0. Collective."""
    load_before = os.getloadavg()[0]
    silence_libraries()
    chosen = list(dict.fromkeys(MEASURES[case] for case in MEASURES if case in settings.cases))
    run = PeerRun(settings, root, cases=len(chosen))
    run.progress.show("choosing the threads of peers", 0.0)
    settled = settle_threads(run)
    spent = run_cases(run, chosen)
    phases = profile(run, Path(settings.profile)) if settings.profile else {}
    run.progress.end()
    if dist.get_rank():
        return None
    report = make_report(run, spent, load_before=load_before)
    machine = report.machine | {"peers": settled, "scaling_ranks": run.ranks}
    return PeerReport(
        **fields_of(replace(report, machine=machine)), figures=tuple(run.figures), phases=phases
    )


def settle_threads(run: PeerRun) -> dict[str, str]:
    """Choose the number of threads of each peer that has a choice. Collective."""
    choices: dict[str, str] = {}
    size = min(run.settings.size, _TRIAL_BYTES)
    model = make_model(size, ranks=run.ranks, dtype=run.dtype)
    source = make_state(model, GridLayout(tp=run.ranks), run.rank, run.dtype)
    for peer in run.peers:
        seconds: dict[int, float] = {}
        for threads in peer.thread_counts:
            peer.threads = threads
            runs = [run.save(peer, source) for _ in range(_TRIALS)]
            seconds[threads] = statistics.median(runs[1:])
        if seconds:
            peer.threads = min(seconds, key=lambda threads: seconds[threads])
            tried = ", ".join(f"{threads}: {spent:.3f} s" for threads, spent in seconds.items())
            choices[peer.name] = f"{peer.threads} threads (a save with {tried})"
    run.clear()
    return choices
