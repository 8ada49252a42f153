"""Our models compute the logits of transformers, from its `config.json` and its weights.

Tolerance: both compute in float32, in another order. Errors of rounding are about 2^-24 = 6e-8 of a value for
each of some ten operations in a row; 1e-5 of the largest logit leaves room for 3 to 4 layers of them. A wrong
norm, position, window or cap is off by parts of a hundred.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.parallel import (
    ParallelGroups,
    ParallelLayout,
)
from models import build_gpt
from models.huggingface import gpt_config
from tests.huggingface_experts import fill
from tests.huggingface_models import (
    FAMILIES,
    SEEDS,
    SEQUENCE,
    arrays_in_our_names,
    random_config,
    random_model,
)
from tests.optim_world import Arrays

transformers = pytest.importorskip("transformers", reason="needs the extra `huggingface`")

RELATIVE = 1e-5
ONE = ParallelGroups.create(ParallelLayout())


def _tokens(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


def _logits(config: dict[str, Any], arrays: Arrays) -> Tensor:
    """Return the logits `[b, s, vocab]` of our model, on one rank."""
    described = gpt_config(config)
    if described.seq_length < SEQUENCE:
        described = replace(described, seq_length=SEQUENCE)
    model = build_gpt(described, ONE)
    assert fill(model.sharded_state_dict(), arrays) == arrays.keys()
    logits = next(iter(model))(_tokens(described.vocab_size))
    return logits.transpose(0, 1)[..., : described.vocab_size]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    config = random_config(family, seed)
    reference = random_model(config, seed)
    with torch.no_grad():
        expected = reference(_tokens(config.vocab_size)).logits
        actual = _logits(json.loads(config.to_json_string()), arrays_in_our_names(reference))
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= RELATIVE, f"{error:.1e} of the largest logit"
