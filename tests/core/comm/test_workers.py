"""Short jobs done by a few threads."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from megackpt.engine.data.workers import run_jobs, useful_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_job_is_done_once(threads: int) -> None:
    done: list[int] = []
    run_jobs([partial(done.append, i) for i in range(1000)], threads=threads, name="test")
    assert sorted(done) == list(range(1000))


def test_the_calling_thread_takes_part_and_no_more_are_made_than_there_are_jobs() -> None:
    names: set[str] = set()
    run_jobs([lambda: names.add(threading.current_thread().name)], threads=8, name="test")
    assert names == {threading.current_thread().name}
    run_jobs([], threads=8, name="test")
    collective = threading.Barrier(3)  # only three at the same time get past it
    run_jobs([partial(collective.wait, 20)] * 3, threads=3, name="test")


def test_no_job_is_under_way_after_threads_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started, never = threading.Thread.start, list[threading.Thread](), threading.Event()

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_jobs([partial(never.wait, 0.2)] * 20, threads=3, name="test")
    assert not started[0].is_alive()


def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    done: list[int] = []
    collective = threading.Barrier(2)

    def fail(number: int) -> None:
        collective.wait(20)  # both have begun before either fails
        raise ValueError(str(number))

    with pytest.raises(ValueError, match=r"^0$"):
        run_jobs(
            [partial(fail, 0), partial(fail, 1), *[partial(done.append, i) for i in range(50)]],
            threads=2,
            name="test",
        )
    assert done == []


@pytest.mark.parametrize(("ranks", "useful"), [("1", 4), ("3", 2), ("99", 1), ("", 4), ("many", 4)])
def test_jobs_that_wait_for_nothing_share_the_processors_with_other_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: str, useful: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert useful_threads(4, waits=False) == useful
    assert useful_threads(4, waits=True) == 4
