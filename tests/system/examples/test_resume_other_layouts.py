"""A run that changes its layout and its optimizer every two steps learns what an uninterrupted one does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.system.examples.training_runs import MOE, metrics_of, train, write_text

PHASES = (  # two steps each
    ("TP2xPP2", "distributed"),
    ("DP4", "distributed"),
    ("TP4", "plain"),
    ("DP4", "plain"),
    ("PP4", "distributed"),
    ("PP2xDP2", "plain"),
    ("TP2xPP2xVPP2", "distributed"),
    ("1 rank", "distributed"),
    ("TP2xDP2", "distributed"),
)
MOE_PHASES = (
    ("TP2xPP2xEP2xETP1", "distributed"),
    ("EP4", "plain"),
    ("TP2xPP2xVPP2", "distributed"),
    ("CP2xDP2xEP2", "distributed"),
    ("1 rank", "plain"),
)
ALLOWED = 1e-5
"""Relative. In float32 without dropout layouts differ by the order of sums only, each rounded at 6e-8; 1e-7
was seen after 16 steps, and a machine that sums otherwise may have a few times that. What resuming can get
wrong is far larger, measured in this test: a lost moment or step count 2e-2 at once, samples shifted by one
7e-4.
"""


@sampled(2)
@pytest.mark.parametrize(
    ("phases", "model"), [(PHASES, ()), (MOE_PHASES, MOE)], ids=["dense", "mixture of experts"]
)
def test_changes_of_layout_and_optimizer_leave_the_losses_as_they_are(
    phases: Sequence[tuple[str, str]], model: Sequence[str], rank_pool: RankPool, tmp_path: Path
) -> None:
    steps = 2 * len(phases)
    flags = [f"--data={write_text(tmp_path / 'text')}", f"--steps={steps}", *model]
    train(rank_pool, phases[0][0], tmp_path / "whole", *flags)
    for phase, (layout, optimizer) in enumerate(phases):
        until = f"--exit-after={2 * phase + 2}"
        train(rank_pool, layout, tmp_path / "elastic", *flags, until, f"--optimizer={optimizer}")

    whole, elastic = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "elastic")
    assert list(elastic) == list(whole) == list(range(1, steps + 1))
    for quantity in ("loss", "grad_norm"):
        off = {step: abs(elastic[step][quantity] / whole[step][quantity] - 1) for step in whole}
        print(f"{quantity}: at most {max(off.values()):.1e} off")
        assert max(off.values()) <= ALLOWED, off
    for quantity in ("lr", "samples"):
        assert [m[quantity] for m in elastic.values()] == [m[quantity] for m in whole.values()]
