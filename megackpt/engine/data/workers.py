"""Runs many short jobs on a few threads. After the first failure no further job begins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

Job = Callable[[], object]


def useful_threads(threads: int, *, waits: bool) -> int:
    """Return how many threads to use, of at most `threads`.

    If jobs wait for a disk or a network, that is all of them. If they only need processors, it is the
    number of processors for each rank of this machine: with more threads, a load from memory by 4 ranks on
    2 processors takes a tenth to a fifth longer. Without torchrun's LOCAL_WORLD_SIZE this process counts as
    the only rank.
    """
    if waits:
        return threads
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_world_size) if local_world_size.isdecimal() else 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(threads, processors // max(1, ranks)))


def run_jobs(jobs: Iterable[Job], *, threads: int, name: str) -> None:
    """Run every job, about in this order, on at most `threads` threads, the caller's included.

    When this returns or raises, no job is running any more.

    Raises:
        Exception: the error of a job; of several failed jobs, of the first one in order. Jobs that had not
            begun when a job failed are not run.
    """
    # All threads share one iterator, which is atomic. A queue of futures would wake a thread for each job,
    # which takes longer than a short job.
    numbered = list(enumerate(jobs))
    todo = iter(numbered)
    failed: list[tuple[int, BaseException]] = []

    def work() -> None:
        for number, job in todo:
            if failed:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                failed.append((number, error))

    others: list[threading.Thread] = []
    try:
        for i in range(min(threads, len(numbered)) - 1):
            thread = threading.Thread(target=work, name=f"{name}-{i}")
            thread.start()
            others.append(thread)
        work()
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread could start; raised below
        failed.append((-1, error))
    # No thread may use the memory of the jobs after this returns, even after an error.
    for thread in others:
        thread.join()
    if failed:
        raise min(failed, key=lambda failure: failure[0])[1]
