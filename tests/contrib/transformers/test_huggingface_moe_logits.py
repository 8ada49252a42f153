"""Models with experts compute the logits of transformers where experts are on other ranks, and cut.

On one rank, and with tp, pp and cp, they are compared in test_huggingface_logits, whose tolerance is used
here, too.
"""

from __future__ import annotations

import pytest

from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.huggingface_experts import FAMILIES
from tests.support.huggingface_models import assert_close, logits, reference, relative_error_of

pytest.importorskip("transformers", reason="the extra huggingface is not installed")
LAYOUTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(dp=2, etp=2),
    "tp2-ep2-etp1": ParallelLayout(tp=2, ep=2, etp=1),
    "pp2-ep2": ParallelLayout(pp=2, dp=2, ep=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_experts_on_other_ranks(
    rank_pool: RankPool, family: str, name: str
) -> None:
    layout = LAYOUTS[name]
    config, arrays, expected = reference(family, 0)
    weights = {key: array.numpy() for key, array in arrays.items()}
    results = rank_pool.run(logits, layout.world_size, config, weights, layout)
    compared = set()
    for rank, actual in enumerate(results):
        if actual is not None:
            dp = layout.coordinates(rank).dp
            assert_close(actual, expected.chunk(layout.dp)[dp], relative_error_of(config))
            compared.add(dp)
    assert compared == set(range(layout.dp))
