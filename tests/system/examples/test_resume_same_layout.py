"""A run that is interrupted and resumed at the same layout is the uninterrupted run, bit for bit.

Dropout is on: the masks after the resume have to be those that would have been drawn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import load_plain_tensors
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.system.examples.training_runs import MOE, metrics_of, train, write_text

STEPS = 6
RUNS = {
    "1 rank": ("1 rank", []),
    "TP2xPP2": ("TP2xPP2", []),
    "TP2xDP2, sequence parallel": ("TP2xDP2", ["--sequence-parallel"]),
    "experts, TP2xPP2xEP2xETP1": ("TP2xPP2xEP2xETP1", [*MOE, "--sequence-parallel"]),
    "experts, CP2xPP2xVPP2xEP2": ("CP2xPP2xVPP2xEP2", [*MOE]),
}


@sampled(6)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, run: str, precision: str
) -> None:
    layout, flags = RUNS[run]
    flags = [*flags, f"--data={write_text(tmp_path / 'text')}", f"--steps={STEPS}", "--dropout=0.1"]
    flags += ["--bf16"] if precision == "bf16" else []

    train(rank_pool, layout, tmp_path / "whole", *flags)
    for until in (2, 5, STEPS):
        train(rank_pool, layout, tmp_path / "parts", *flags, f"--exit-after={until}")

    whole, parts = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert list(parts) == list(whole) == list(range(1, STEPS + 1))
    assert parts == whole  # loss, gradient norm, learning rate and samples of every step, with ==
    last = f"iter_{STEPS:07d}"
    expected, actual = (
        load_plain_tensors(tmp_path / "whole" / last),
        load_plain_tensors(tmp_path / "parts" / last),
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
