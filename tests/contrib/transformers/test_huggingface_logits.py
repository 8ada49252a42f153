"""Our models compute the logits of transformers, from its `config.json` and its weights.

Tolerance, `RELATIVE`: both compute in float32, in another order. Errors of rounding are about 2^-24 = 6e-8 of
a value for each of some ten operations in a row; 1e-5 of the largest logit leaves room for 3 to 4 layers of
them. A wrong norm, position, window or cap is off by parts of a hundred. A recurrence
carries errors from token to token: 1e-4 there.
"""

from __future__ import annotations

import pytest

from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.support.huggingface_models import (
    FAMILIES,
    SEEDS,
    assert_close,
    logits,
    reference,
    relative_error_of,
)

pytest.importorskip("transformers", reason="the extra huggingface is not installed")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    config, arrays, expected = reference(family, seed)
    weights = {key: array.numpy() for key, array in arrays.items()}
    assert_close(logits(config, weights, ParallelLayout()), expected, relative_error_of(config))


@sampled(6)
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [(ParallelLayout(tp=2, pp=2), True), (ParallelLayout(tp=2, cp=2), False)],
    ids=["tp2-pp2-sequence", "tp2-cp2"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_several_ranks_are_those_of_transformers(
    rank_pool: RankPool, family: str, layout: ParallelLayout, sequence_parallel: bool
) -> None:
    config, arrays, expected = reference(family, 0)
    weights = {key: array.numpy() for key, array in arrays.items()}
    for actual in rank_pool.run(logits, 4, config, weights, layout, sequence_parallel):
        if actual is not None:
            assert_close(actual, expected, relative_error_of(config))
