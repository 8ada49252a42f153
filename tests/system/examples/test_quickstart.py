"""examples/quickstart.py as the docs start it: four ranks, then two."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.docs import ROOT, blocks_of
from tests.support.effort import with_all
from tests.system.examples.command_line import TIMEOUT_S, quiet, torchrun

pytestmark = with_all("other tests resume other examples in this way; .ci/run has this one")

QUICKSTART = ROOT / "examples" / "quickstart.py"
PAGE = ROOT / "docs" / "index.md"


def run_quickstart(ranks: int, directory: Path) -> str:
    run = subprocess.run(
        torchrun(ranks, QUICKSTART),
        env=quiet({}),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return run.stdout


def test_two_ranks_continue_what_four_have_begun(tmp_path: Path) -> None:
    printed = run_quickstart(4, tmp_path) + run_quickstart(2, tmp_path)
    (shown,) = (block.code for block in blocks_of(PAGE.read_text()) if block.kind == "text")
    assert set(shown.splitlines()) <= set(printed.splitlines())
    lines = re.findall(r"step (\d+), \d ranks, loss (\S+)", printed)
    losses_by_step = {int(step): float(loss) for step, loss in lines}
    weight = torch.zeros((), requires_grad=True)  # each weight of the layer takes the same course
    adam = torch.optim.Adam([weight], lr=0.1)
    for step in range(1, 21):
        loss = (weight - 3).square()
        adam.zero_grad()
        # The mean over 8 features divides the gradient; Adam's steps do not depend on its scale, but for eps.
        loss.backward()
        adam.step()
        assert losses_by_step[step] == pytest.approx(loss.item(), abs=2e-4)  # four digits are printed
    assert len(losses_by_step) == 20
    assert sorted(losses_by_step.values(), reverse=True) == [losses_by_step[step] for step in range(1, 21)]
