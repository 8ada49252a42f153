"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megackpt.testing.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Worker ranks for the whole session: `rank_pool.run(fn, 4, *args)` runs fn on 4 gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-pairs", action="store_true", help="test all 49 pairs of layouts, not a sample")
    parser.addoption("--interop", action="store_true", help="run the whole interop matrix (minutes)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, visibly, where there is no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
