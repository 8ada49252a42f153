"""A pool of ranks that is closed leaves no process behind."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest

from megackpt.testing.ranks import RankPool
from tests.async_saves import is_alive
from tests.compat.megatron_world import may_start_processes
from tests.effort import costly

pytestmark = pytest.mark.multiprocess

KEPT: list[Any] = []


def start_manager() -> int:
    """Start a process that lives as long as this one, and return its id."""
    with may_start_processes():
        manager: Any = get_context("spawn").Manager()
    KEPT.append(manager)
    return int(manager._process.pid)


@costly("only code of Megatron-Core starts processes on a rank")
def test_what_a_rank_has_started_ends_with_the_pool() -> None:
    pool = RankPool()
    processes = [*pool.pids(2), *pool.run(start_manager, 2)]
    assert all(map(is_alive, processes))
    pool.close()
    assert not any(map(is_alive, processes))
