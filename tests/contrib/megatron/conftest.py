"""Ranks in which Megatron-Core runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from megackpt.testing.ranks import RankPool


@pytest.fixture(scope="session")
def core_ranks() -> Iterator[RankPool]:
    """Worker ranks that import Megatron-Core itself: what a worker has imported, it keeps."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install megatron-core==0.16.1")
    pool = RankPool()
    yield pool
    pool.close()
