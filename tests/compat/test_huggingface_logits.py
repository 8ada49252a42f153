"""Our models compute the logits of transformers, from its `config.json` and its weights.

Tolerance: both compute in float32, in another order. Errors of rounding are about 2^-24 = 6e-8 of a value for
each of some ten operations in a row; 1e-5 of the largest logit leaves room for 3 to 4 layers of them. A wrong
norm, position, window or cap is off by parts of a hundred.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPTConfig
from models.huggingface import gpt_config
from tests.huggingface_models import (
    FAMILIES,
    SEEDS,
    SEQUENCE,
    arrays_in_our_names,
    logits,
    random_config,
    random_model,
    token_ids,
)
from tests.optim_world import Arrays

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

RELATIVE = 1e-5


@functools.cache
def _reference(family: str, seed: int) -> tuple[GPTConfig, Arrays, Tensor]:
    """Return our config, the weights as our arrays, and the logits `[b, s, vocab]` of transformers."""
    config = random_config(family, seed)
    model = random_model(config, seed)
    ours = gpt_config(json.loads(config.to_json_string()))
    if ours.seq_length < SEQUENCE:  # drawn with a scaling for longer sequences
        ours = replace(ours, seq_length=SEQUENCE)
    ours = replace(ours, make_vocab_divisible=1)
    with torch.no_grad():
        return ours, arrays_in_our_names(model), model(token_ids(ours.vocab_size)).logits


def _assert_close(actual: Any, expected: Tensor) -> None:
    error = (torch.from_numpy(actual) - expected).abs().max() / expected.abs().max()
    assert error <= RELATIVE, f"off by {error:.1e} of the largest logit"


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    config, arrays, expected = _reference(family, seed)
    weights = {key: array.numpy() for key, array in arrays.items()}
    _assert_close(logits(config, weights, ParallelLayout()), expected)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [(ParallelLayout(tp=2, pp=2), True), (ParallelLayout(tp=2, cp=2), False)],
    ids=["tp2-pp2-sequence", "tp2-cp2"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_several_ranks_are_those_of_transformers(
    rank_pool: RankPool, family: str, layout: ParallelLayout, sequence_parallel: bool
) -> None:
    config, arrays, expected = _reference(family, 0)
    weights = {key: array.numpy() for key, array in arrays.items()}
    for actual in rank_pool.run(logits, 4, config, weights, layout, sequence_parallel):
        if actual is not None:
            _assert_close(actual, expected)
