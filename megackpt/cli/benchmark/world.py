"""Runs the benchmark on the ranks of torchrun, or else on processes that it starts.

Before anything is measured, each peer tries a few numbers of writing threads and keeps the fastest, which
depends on the machine and the file system.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from megackpt.cli.benchmark.cases import CASES
from megackpt.cli.benchmark.measure import BenchRun
from megackpt.cli.benchmark.ours import other_formats
from megackpt.cli.benchmark.peers import check_peers
from megackpt.cli.benchmark.report import Report
from megackpt.cli.benchmark.settings import BenchSettings
from megackpt.cli.benchmark.state import GridLayout, make_model, make_state
from megackpt.cli.benchmark.tracing import Phases, profile
from megackpt.comm.child_processes import without_current_directory
from megackpt.errors import DeclarationError, RankFailedError

_TIMEOUT = timedelta(minutes=30)
_SCALING = "scaling"


def run_bench(settings: BenchSettings) -> Report | None:
    """Measure, and return what was found; None on ranks of torchrun other than 0.

    How throughput scales is measured in a world of its own, of `settings.scaling` ranks where these are not
    the ranks of the rest; under torchrun in the one that is there.

    Raises:
        DeclarationError: a setting that cannot be, or a directory that ranks do not share.
        RankFailedError: a rank failed; the text has its error.
    """
    # Unknown formats and peers are errors before anything starts.
    list(other_formats(settings.formats))
    check_peers(settings.peers)
    _check_room(settings)
    Path(settings.directory).mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_under_torchrun(settings)
    report = reduce(_joined, map(_spawn, _worlds(settings)))
    return replace(report, command=asdict(settings))


def _check_room(settings: BenchSettings) -> None:
    """Raise an error for a size that cannot be, before anything is begun that would fill the disk."""
    directory = Path(settings.directory).absolute()
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    if settings.size > free:
        raise DeclarationError(
            f"size is {settings.size:,} bytes, and {settings.directory} has {free:,} left. Give another "
            f"directory, or a size that fits several times.",
            path=settings.directory,
        )


def _worlds(settings: BenchSettings) -> list[BenchSettings]:
    """Return the cases to measure for each world of processes."""
    if _SCALING not in settings.cases or settings.scaling == settings.ranks:
        return [settings]
    apart = replace(settings, cases=(_SCALING,), ranks=settings.scaling, peers=(), formats=())
    rest = tuple(case for case in settings.cases if case != _SCALING)
    return [replace(settings, cases=rest), replace(apart, profile=None)] if rest else [apart]


def _spawn(settings: BenchSettings) -> Report:
    """Measure in processes of our own."""
    with _temporary_directory(settings) as root:
        try:
            with without_current_directory():
                spawn(_rank, (settings, str(root)), nprocs=settings.ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailedError(f"A rank of the benchmark failed: {error}") from error
        return Report.from_json(json.loads((root / "report.json").read_text()))


def _joined(report: Report, scaling: Report) -> Report:
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


def _rank(rank: int, settings: BenchSettings, root: str) -> None:
    """One process of `run_bench`."""
    os.dup2(2, 1)  # the command's stdout is for its result only; some libraries print there
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    os.environ["LOCAL_WORLD_SIZE"] = str(settings.ranks)  # as torchrun says it
    address = f"file://{root}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=settings.ranks, timeout=_TIMEOUT
    )
    try:
        report = _measure(settings, Path(root))
        if report is not None:
            (Path(root) / "report.json").write_text(json.dumps(report.to_json()))
    finally:
        dist.destroy_process_group()


def _run_under_torchrun(settings: BenchSettings) -> Report | None:
    if int(os.environ["WORLD_SIZE"]) != settings.ranks:
        settings = replace(settings, ranks=int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        root: list[Any] = [None]
        if dist.get_rank() == 0:
            root = [tempfile.mkdtemp(prefix="megackpt-bench-", dir=settings.directory)]
        dist.broadcast_object_list(root)
        if not Path(root[0]).is_dir():
            raise DeclarationError(
                f"{root[0]} is not there on rank {dist.get_rank()}. Give a directory that all ranks share.",
                rank=dist.get_rank(),
                path=root[0],
            )
        report = _measure(settings, Path(root[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root[0])
        return report
    finally:
        dist.destroy_process_group()


@contextmanager
def _temporary_directory(settings: BenchSettings) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="megackpt-bench-", dir=settings.directory))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def _measure(settings: BenchSettings, root: Path) -> Report | None:
    """Measure on one rank; return the report on rank 0."""
    load_before = os.getloadavg()[0]
    _silence_peers()
    chosen = list(dict.fromkeys(CASES[case] for case in CASES if case in settings.cases))
    run = BenchRun(settings, root, cases=len(chosen))
    run.progress.show("choosing the threads of peers", 0.0)
    settled = _settle_threads(run)
    spent = _run_cases(run, chosen)
    phases = profile(run, Path(settings.profile)) if settings.profile else {}
    run.progress.end()
    if dist.get_rank():
        return None
    machine = _machine(settings, load_before=load_before) | {
        "peers": settled,
        "has_cold_files": run.has_cold_files,
        "scaling_ranks": run.ranks,
        "spent_s": spent,
    }
    return _report(run, machine, phases)


def _report(run: BenchRun, machine: dict[str, Any], phases: Phases) -> Report:
    return Report(
        command=asdict(run.settings),
        machine=machine,
        state={
            "nbytes": run.nbytes,
            "parameters": sum(array.numel for array in run.model),
            "arrays": len(run.model) * 4,
        },
        rows=tuple(run.results.rows()),
        figures=tuple(run.results.figures),
        phases=phases,
    )


def _run_cases(run: BenchRun, measures: Sequence[Callable[[BenchRun], None]]) -> dict[str, float]:
    """Measure one case after the other; return the seconds that each took, by name."""
    spent: dict[str, float] = {}
    for measure in measures:
        name = measure.__name__.removeprefix("measure_")
        began = time.perf_counter()
        run.progress.begin(name.replace("_", " "))
        measure(run)
        spent[name] = round(time.perf_counter() - began, 1)
    return spent


def _silence_peers() -> None:
    """Ignore warnings and log lines of other libraries, which would hide the tables."""
    warnings.filterwarnings("ignore", module=r"(?!megackpt)")
    for library in ("torch", "megatron"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _machine(settings: BenchSettings, *, load_before: float) -> dict[str, Any]:
    packages = {"torch": str(torch.__version__)}
    for name in ("megackpt", "megatron-core", "tensorstore"):
        try:
            packages[name] = version(name)
        except ImportError:
            continue
    return {
        "directory": settings.directory,
        "cpus": os.cpu_count(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
    }


_TRIAL_BYTES = 512 << 20  # at most; large enough that starting threads or processes does not decide
_TRIALS = 3  # of which the first does not count


def _settle_threads(run: BenchRun) -> dict[str, str]:
    """Choose the number of threads of each peer that has a choice. Collective.

    Returns:
        The choice and the times of all trials, as text, by peer.
    """
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
