"""Real peers read what we write, and we read what they write; every value bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.effort import with_all
from tests.system.interop import matrix
from tests.system.interop.environments import lacks
from tests.system.interop.plan import STOCK_NEW, STOCK_OLD, TORCH_DIST, ZARR_1, ZARR_3, Backend


@with_all("it takes minutes; golden checkpoints of every format are read")
def test_here_every_peer_reads_what_the_others_wrote_at_another_layout(tmp_path: Path) -> None:
    missing = lacks(STOCK_NEW.env, *STOCK_NEW.modules)
    if missing:
        pytest.skip(missing)
    passed, wrong = matrix.run_all(TORCH_DIST, tmp_path, few=True)
    assert wrong == []
    assert passed >= 15


@with_all("it takes many minutes; golden checkpoints of every format are read")
@pytest.mark.parametrize("backend", [TORCH_DIST, ZARR_1, ZARR_3], ids=lambda b: f"{b[0]}{b[1]}")
def test_every_reading_passes_or_reports_why_that_peer_cannot(backend: Backend, tmp_path: Path) -> None:
    missing = lacks(STOCK_OLD.env)
    if missing:
        pytest.skip(missing)
    _, wrong = matrix.run_all(backend, tmp_path, few=False)
    assert wrong == []
