"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.effort import ALL, leave_out, tries_all
from tests.support.surroundings import forget_surroundings

forget_surroundings()  # before torch is imported: it reads some of them once

import hypothesis
import pytest

from megackpt.testing.ranks import RankPool
from tests.support.s3_server import FaultyProxy, S3Server

# A bound on the time of an example fails where the machine is busy, and says nothing about the code.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Worker ranks for the whole session: `rank_pool.run(fn, 4, *args)` runs fn on 4 gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server for the whole session; each test takes a prefix of its own in its bucket."""
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    if importlib.util.find_spec("moto") is None:  # to import it here would take a second
        pytest.skip("moto and flask are not installed")
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    """A proxy before the server that counts requests and spoils those that a test chooses."""
    proxy = FaultyProxy(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where the machine has such a thing; real ranks may be given it, too."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="megackpt-tests-", dir=shared) as made:
        yield Path(made)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="try every case of everything, not a sample (hours)")


def pytest_configure(config: pytest.Config) -> None:
    """Let decorators know, which are evaluated when a test's module is imported."""
    if config.getoption("--all"):
        os.environ[ALL] = "1"


def pytest_report_header() -> str:
    return "every case" if tries_all() else "a sample of the cases; --all tries every one"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, visibly, `gpu` tests where there is no CUDA device; leave out cases that only `--all` tries."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    if not tries_all():
        leave_out(config, items)
