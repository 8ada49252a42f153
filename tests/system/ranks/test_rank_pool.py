"""A pool of ranks leaves no process and no folder behind, and no job holds up the next."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.megatron_world import may_start_processes
from tests.support.effort import with_all
from tests.support.writers import is_alive

KEPT: list[Any] = []


def start_manager() -> int:
    """Start a process that lives as long as this one, and return its id."""
    with may_start_processes():
        manager: Any = get_context("spawn").Manager()
    KEPT.append(manager)
    return int(manager._process.pid)


@with_all("only code of Megatron-Core starts processes on a rank")
def test_what_a_rank_has_started_ends_with_the_pool() -> None:
    pool = RankPool()
    processes = [*pool.pids(2), *pool.run(start_manager, 2)]
    assert all(map(is_alive, processes))
    pool.close()
    assert not any(map(is_alive, processes))


def file_of_the_store() -> str:
    return str(dist.distributed_c10d._get_default_store().underlying_store.path)


def test_the_folder_of_a_job_s_store_is_there_until_the_pool_is_closed() -> None:
    """A rank may destroy its store after the job. If the file goes just then, the destructor waits for it."""
    pool = RankPool()
    try:
        (path,) = set(pool.run(file_of_the_store, 2))
        assert Path(path).parent.exists()
    finally:
        pool.close()
    assert not Path(path).parent.exists()
