"""examples/pretrain_t5.py: several ranks begin, one goes on, and the losses are those of one run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pretrain_t5
import pytest

from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled


@sampled(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"pp": 2}), (2, {"pp": 2, "encoder_stages": 1}), (4, {"cp": 2})],
    ids=["pp2", "pp2-split", "cp2-dp2"],
)
def test_one_rank_continues_what_several_have_begun(
    ranks: int, layout: dict[str, int], rank_pool: RankPool, tmp_path: Path
) -> None:
    def flags(directory: str, steps: int, **layout: int) -> argparse.Namespace:
        chosen = {"tp": 1, "pp": 1, "cp": 1, "encoder_stages": None, **layout}
        return argparse.Namespace(**chosen, steps=steps, ckpt=tmp_path / directory)

    begun = rank_pool.run(pretrain_t5.run, ranks, flags("changed", 2, **layout))[0]
    continued = rank_pool.run(pretrain_t5.run, 1, flags("changed", 2))[0]
    (expected,) = rank_pool.run(pretrain_t5.run, 1, flags("same", 4))
    assert begun + continued == pytest.approx(expected, rel=1e-4)  # float32, sums in another order
    assert expected[-1] < expected[0]
