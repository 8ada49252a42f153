"""What a peer is asked to do, and the process that does it on its ranks.

A peer is a program: `python peer.py JOBS.json RESULTS.json [flags]`. It starts its ranks once, does every
job on all of them and writes the error of each job, or "". Imported by every peer in its own environment, so
it knows torch only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

RANKS = 4
PATIENCE_S = 60  # between the first rank that is done with a job and the last


@dataclass(frozen=True)
class Job:
    """One checkpoint to write or read."""

    op: str  # `write` or `read`
    kind: str  # `model`, `adam` (a plain optimizer) or `distopt` (one cut over data-parallel ranks)
    path: str  # the checkpoint's directory
    backend: str = "torch_dist"  # `torch_dist` or `zarr`
    tp: int = 1  # size of tensor parallelism; what tp * pp leaves of four ranks is data parallelism
    pp: int = 1  # size of pipeline parallelism
    optimizer_format: str = ""  # what Megatron-Core calls the sharding type of its distributed optimizer
    same_layout: bool = False  # the checkpoint was written at this layout (reading)
    by_megatron: bool = True  # the checkpoint has the oracle's common state, and an object of each rank
    version: int = 1  # version of the backend
    naming: str = "megatron"  # whose names the arrays have: `megatron` or `dcp`

    def dp(self, ranks: int) -> int:
        return ranks // (self.tp * self.pp)


def main(start: Callable[[list[str]], None], run: Callable[[Job], None]) -> None:
    """Do the jobs of a file on four ranks, as the command line of a peer says.

    Where ranks fail differently, some wait for others that will never come: then all are ended, and new ones
    go on with the next job.
    """
    jobs_file, results_file, *flags = sys.argv[1:]
    ranks = next((int(f.removeprefix("--ranks=")) for f in flags if f.startswith("--ranks=")), RANKS)
    count = len(json.loads(Path(jobs_file).read_text()))
    results: list[str] = []
    while len(results) < count:
        with tempfile.TemporaryDirectory(prefix="interop-") as folder:
            _run_ranks(ranks, (Path(sys.argv[0]).stem, jobs_file, len(results), flags, folder))
            results += _collect(Path(folder), ranks, count - len(results))
        Path(results_file).write_text(json.dumps(results))


def _run_ranks(count: int, args: tuple[Any, ...]) -> None:
    context = get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, count, *args)) for rank in range(count)]
    for process in ranks:
        process.start()
    wait([process.sentinel for process in ranks])
    deadline = time.monotonic() + PATIENCE_S  # the first has ended: all of them end, or wait for it in vain
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _collect(folder: Path, ranks: int, most: int) -> list[str]:
    """Return of each job that was begun the first error that a rank reported."""
    of_ranks = [[json.loads(line) for line in _lines(folder / f"{rank}")] for rank in range(ranks)]
    if not any(of_ranks):
        sys.exit("no rank began a job: see above")
    begun = min(max(1, *map(len, of_ranks)), most)
    errors = []
    for number in range(begun):
        reported = [of_rank[number] for of_rank in of_ranks if number < len(of_rank)]
        silent = "" if len(reported) == ranks else "a rank ended, or waited for the others, without a word"
        errors.append(next(filter(None, reported), silent))
    return errors


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _rank(rank: int, ranks: int, module: str, jobs: str, first: int, flags: list[str], folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=180))
    peer = importlib.import_module(module)
    peer.start(flags)
    for number, job in enumerate(json.loads(Path(jobs).read_text())[first:]):
        with open(f"{folder}/{rank}", "a") as file:
            file.write(json.dumps(_error_of(peer.run, Job(**job))) + "\n")
        store.set(f"{number}/{rank}", b"done")
        try:
            store.wait([f"{number}/{other}" for other in range(ranks)], timedelta(seconds=PATIENCE_S))
        except RuntimeError:
            break  # the others wait for this rank somewhere in the job
    os._exit(0)  # gloo threads of groups that a failed job left behind do not always end


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _error_of(run: Callable[[Job], None], job: Job) -> str:
    try:
        run(job)
    except BaseException as error:  # noqa: BLE001 - DCP's CheckpointException is not an Exception
        return f"{traceback.format_exc()}\n{type(error).__name__}: {error}"
    return ""
