"""Qwen3-Next: logits and gradients of transformers, on one rank and over tp, pp and ep.

Its folders, config and map are in the tests of all families.

Tolerance: everything is float32 and only the order of sums differs. An element of a gradient is a sum of some
2 * 24 * 50 rounded terms, whose random errors are sqrt(2400) * 2^-24 = 3e-6 of their size; the recurrence
multiplies them, as it divides queries and keys by their lengths: 4e-5 of the largest element was seen. A
missing sum is off by a factor of 2.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
from models import DeltaNetConfig, RotaryConfig
from tests.effort import is_thorough
from tests.huggingface_cases import Case, batch, check, run
from tests.huggingface_models import (
    SCAN_RELATIVE,
    arrays_in_our_names,
    random_config,
    random_model,
    reference,
)

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

FAMILY = "qwen3_next"
SEEDS = range(6 if is_thorough() else 2)


@functools.cache
def case(seed: int) -> Case:
    """Return a random model, and the gradients of its loss."""
    config, arrays, logits = reference(FAMILY, seed)
    weights = {key: array.detach().numpy().copy() for key, array in arrays.items()}
    model: Any = random_model(random_config(FAMILY, seed), seed)
    tokens, labels = batch(config)
    F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    return Case(config, weights, logits, arrays_in_our_names(model))


def test_seeds_have_all_kinds_of_the_family() -> None:
    configs = [reference(FAMILY, seed)[0] for seed in range(6)]
    blocks = {block for config in configs for layer in config.blocks for block in layer}
    assert blocks == {"attention", "delta_net", "mlp", "moe"}
    nets = [config.delta_net for config in configs if isinstance(config.delta_net, DeltaNetConfig)]
    assert {net.num_value_heads // net.num_key_heads for net in nets} >= {1, 2}
    assert len({net.conv_kernel_size for net in nets}) > 1
    rotary = [config.positions for config in configs if isinstance(config.positions, RotaryConfig)]
    assert {positions.fraction < 1 for positions in rotary} == {True, False}
    assert {config.attention.qkv_bias for config in configs} == {True, False}
    assert {config.tied_embeddings for config in configs} == {True, False}


def test_one_rank_computes_logits_and_gradients_of_transformers() -> None:
    cases = [case(seed) for seed in SEEDS]
    ranks = [run([(made.config, made.weights) for made in cases], ParallelLayout())]
    check(ranks, ParallelLayout(), cases, relative=SCAN_RELATIVE)


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
}


@pytest.mark.one_in(4)
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_logits_and_gradients_of_transformers(rank_pool: RankPool, name: str) -> None:
    cases = [case(100 * seed) for seed in SEEDS]  # those that 2 ranks can have
    models = [(made.config, made.weights) for made in cases]
    ranks = rank_pool.run(run, 2, models, LAYOUTS[name], name.endswith("sequence"))
    check(ranks, LAYOUTS[name], cases, relative=SCAN_RELATIVE)
