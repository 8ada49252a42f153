"""Ranks in which Megatron-Core runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from megackpt.testing.ranks import RankPool


@pytest.fixture(scope="session")
def megatron_core() -> None:
    """Skip what needs Megatron-Core where it is not installed."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install megatron-core==0.16.1")


@pytest.fixture(scope="session")
def core_ranks(megatron_core: None) -> Iterator[RankPool]:
    """Worker ranks that import Megatron-Core itself: what a worker has imported, it keeps."""
    pool = RankPool()
    yield pool
    pool.close()
