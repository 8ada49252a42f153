"""Runs the benchmark on the ranks of torchrun, or else on processes that it starts."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from megackpt.cli.benchmark.cases import CASES
from megackpt.cli.benchmark.contenders import other_formats
from megackpt.cli.benchmark.measure import BenchRun
from megackpt.cli.benchmark.report import Report
from megackpt.cli.benchmark.settings import BenchSettings
from megackpt.comm.child_processes import without_current_directory
from megackpt.errors import DeclarationError, RankFailedError

_TIMEOUT = timedelta(minutes=30)

S = TypeVar("S", bound=BenchSettings)
R = TypeVar("R", bound=BenchRun)


def run_bench(settings: BenchSettings) -> Report | None:
    """Measure, and return what was found; None on ranks of torchrun other than 0.

    Raises:
        DeclarationError: a setting that cannot be, or a directory that ranks do not share.
        RankFailedError: a rank failed; the text has its error.
    """
    values = run_ranks(settings, measure)
    return None if values is None else Report.from_json(values)


def run_ranks(settings: S, work: Callable[[S, Path], Report | None]) -> dict[str, Any] | None:
    """Call `work(settings, directory)` on every rank, and return the report of rank 0 as JSON values.

    None on ranks of torchrun other than 0.

    Args:
        settings: what is measured.
        work: a function that processes can import. It gets an empty directory that all ranks share and
            that is removed at the end.
    """
    # An unknown format is an error before anything starts.
    list(other_formats(settings.formats))
    _check_room(settings)
    Path(settings.directory).mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_under_torchrun(settings, work)
    return _spawn(settings, work)


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


def _spawn(settings: S, work: Callable[[S, Path], Report | None]) -> dict[str, Any]:
    """Measure in processes of our own."""
    with _temporary_directory(settings) as root:
        try:
            with without_current_directory():
                spawn(_rank, (settings, work, str(root)), nprocs=settings.ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailedError(f"A rank of the benchmark failed: {error}") from error
        values: dict[str, Any] = json.loads((root / "report.json").read_text())
        return values


def _rank(rank: int, settings: S, work: Callable[[S, Path], Report | None], root: str) -> None:
    """One process of `run_ranks`."""
    os.dup2(2, 1)  # the command's stdout is for its result only; some libraries print there
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    os.environ["LOCAL_WORLD_SIZE"] = str(settings.ranks)  # as torchrun says it
    address = f"file://{root}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=settings.ranks, timeout=_TIMEOUT
    )
    try:
        report = work(settings, Path(root))
        if report is not None:
            (Path(root) / "report.json").write_text(json.dumps(report.to_json()))
    finally:
        dist.destroy_process_group()


def _run_under_torchrun(settings: S, work: Callable[[S, Path], Report | None]) -> dict[str, Any] | None:
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
        report = work(settings, Path(root[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root[0])
        return None if report is None else report.to_json()
    finally:
        dist.destroy_process_group()


@contextmanager
def _temporary_directory(settings: BenchSettings) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="megackpt-bench-", dir=settings.directory))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def measure(settings: BenchSettings, root: Path) -> Report | None:
    """Measure the cases on one rank; return the report on rank 0. Collective."""
    load_before = os.getloadavg()[0]
    silence_libraries()
    chosen = list(dict.fromkeys(CASES[case] for case in CASES if case in settings.cases))
    run = BenchRun(settings, root, cases=len(chosen))
    spent = run_cases(run, chosen)
    run.progress.end()
    return None if dist.get_rank() else make_report(run, spent, load_before=load_before)


def run_cases(run: R, measures: Sequence[Callable[[R], None]]) -> dict[str, float]:
    """Measure one case after the other; return the seconds that each took, by name. Collective."""
    spent: dict[str, float] = {}
    for measure in measures:
        name = measure.__name__.removeprefix("measure_")
        began = time.perf_counter()
        run.progress.begin(name.replace("_", " "))
        measure(run)
        spent[name] = round(time.perf_counter() - began, 1)
    return spent


def silence_libraries() -> None:
    """Ignore warnings and log lines of other libraries, which would hide the tables."""
    warnings.filterwarnings("ignore", module=r"(?!megackpt)")
    for library in ("torch", "megatron"):
        logging.getLogger(library).setLevel(logging.ERROR)


def make_report(run: BenchRun, spent_s: dict[str, float], *, load_before: float) -> Report:
    """Return the report of what a run has measured, with the machine and the state."""
    machine = _machine(run.settings, load_before=load_before)
    return Report(
        command=asdict(run.settings),
        machine=machine | {"has_cold_files": run.has_cold_files, "spent_s": spent_s},
        state={
            "nbytes": run.nbytes,
            "parameters": sum(array.numel for array in run.model),
            "arrays": len(run.model) * 4,
        },
        rows=tuple(run.results.rows()),
    )


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
