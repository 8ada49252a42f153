"""Real peers read what we write, and we read what they write; every value bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import matrix
import pytest
from environments import lacks
from page import PAGE
from plan import TORCH_DIST, ZARR_1, ZARR_3, STOCK_NEW, STOCK_OLD, Backend, checkpoints, reads

pytestmark = pytest.mark.multiprocess


def test_here_every_peer_reads_what_the_others_wrote_at_another_layout(tmp_path: Path) -> None:
    missing = lacks(STOCK_NEW.env, *STOCK_NEW.modules)
    if missing:
        pytest.skip(missing)
    table = matrix.table_of(TORCH_DIST, tmp_path, few=True)
    assert table.wrong() == []
    assert sum(cell.passed for cells in table.rows.values() for cell in cells.values()) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TORCH_DIST, ZARR_1, ZARR_3], ids=lambda b: f"{b[0]}{b[1]}")
def test_every_cell_passes_or_says_why_that_peer_cannot(
    backend: Backend, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--interop"):
        pytest.skip("takes many minutes: --interop")
    missing = lacks(STOCK_OLD.env)
    if missing:
        pytest.skip(missing)
    table = matrix.table_of(backend, tmp_path, few=False)
    assert table.wrong() == []


def test_the_page_has_no_cell_that_went_wrong() -> None:
    assert "WRONG" not in PAGE.read_text()


@pytest.mark.parametrize("backend", [TORCH_DIST, ZARR_1, ZARR_3], ids=lambda b: f"{b[0]}{b[1]}")
def test_the_page_counts_the_readings_that_the_plan_has(backend: Backend) -> None:
    section = PAGE.read_text().split(f"## {backend[0]}, version {backend[1]}")[1].split("##")[0]
    readable = [r for w in checkpoints(backend, few=False) for r in reads(w, few=False) if not r.refused]
    passed = sum(int(n) for n in re.findall(r"pass \((\d+)\)", section))
    unwritable = [r for r in readable if matrix.unwritten(r.written)[0]]
    assert passed == len(readable) - len(unwritable), "generate it: python tests/interop/matrix.py --page"
