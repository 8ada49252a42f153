"""Real peers read what we write, and we read what they write; every value bit for bit."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from environments import lacks
from plan import STOCK_NEW, STOCK_OLD, TORCH_DIST, ZARR_1, ZARR_3, Backend

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_here_every_peer_reads_what_the_others_wrote_at_another_layout(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--interop"):
        pytest.skip("takes minutes: --interop")
    missing = lacks(STOCK_NEW.env, *STOCK_NEW.modules)
    if missing:
        pytest.skip(missing)
    table = matrix.table_of(TORCH_DIST, tmp_path, few=True)
    assert table.wrong() == []
    assert sum(cell.passed for cells in table.rows.values() for cell in cells.values()) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TORCH_DIST, ZARR_1, ZARR_3], ids=lambda b: f"{b[0]}{b[1]}")
def test_every_cell_passes_or_reports_why_that_peer_cannot(
    backend: Backend, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--interop"):
        pytest.skip("takes many minutes: --interop")
    missing = lacks(STOCK_OLD.env)
    if missing:
        pytest.skip(missing)
    table = matrix.table_of(backend, tmp_path, few=False)
    assert table.wrong() == []
