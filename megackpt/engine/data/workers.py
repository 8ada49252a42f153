"""Many short jobs, done by a few threads.

Owns how jobs are handed out, and that a failure ends all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

Job = Callable[[], object]


def useful_threads(threads: int, *, waits: bool) -> int:
    """Return how many of at most `threads` threads are worth having.

    All of them, if jobs wait for a disk or a network. If they only need processors, as many as there are for
    each rank of this machine: more take turns, which costs a tenth to a fifth of the time of a load out of
    memory by 4 ranks on 2 processors. Without torchrun's LOCAL_WORLD_SIZE this process counts as the only
    rank.
    """
    if waits:
        return threads
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(said) if said.isdecimal() else 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(threads, processors // max(1, ranks)))


def run_jobs(jobs: Iterable[Job], *, threads: int, name: str) -> None:
    """Do every job, in about this order, on at most `threads` threads; the calling one is among them.

    Raises:
        Exception: what a job has raised; of several that failed the first in the order of jobs. Jobs that had
            not begun by then are left out. No job is under way any more.
    """
    # One iterator for all: a queue of futures wakes a thread for each job, which costs more than a short one.
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
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread to be had; raised below
        failed.append((-1, error))
    # None may touch the memory of the jobs after this returns, whatever happened.
    for thread in others:
        thread.join()
    if failed:
        raise min(failed, key=lambda failure: failure[0])[1]
