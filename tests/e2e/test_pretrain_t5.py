"""examples/pretrain_t5.py: two ranks begin, one goes on, and the losses are those of one run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pretrain_t5
import pytest

from megackpt.testing.ranks import RankPool


@pytest.mark.one_in(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize("split", [None, 1])
def test_one_rank_continues_what_two_have_begun(
    split: int | None, rank_pool: RankPool, tmp_path: Path
) -> None:
    def flags(directory: str, steps: int, pp: int = 1) -> argparse.Namespace:
        stages = split if pp > 1 else None
        return argparse.Namespace(tp=1, pp=pp, encoder_stages=stages, steps=steps, ckpt=tmp_path / directory)

    begun = rank_pool.run(pretrain_t5.run, 2, flags("changed", 2, pp=2))[0]
    continued = rank_pool.run(pretrain_t5.run, 1, flags("changed", 2))[0]
    (expected,) = rank_pool.run(pretrain_t5.run, 1, flags("same", 4))
    assert begun + continued == pytest.approx(expected, rel=1e-4)  # float32, sums in another order
    assert expected[-1] < expected[0]
