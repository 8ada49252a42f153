"""DeepSeek-V3: logits and gradients of transformers, on one rank and over tp, pp and ep.

Tolerance: everything is float32 and only the order of sums differs. `RELATIVE` of test_huggingface_logits is
used for logits; an element of a gradient is a sum of some 2 * 24 * 50 rounded terms, whose random errors are
sqrt(2400) * 2^-24 = 3e-6 of the largest element of its array. A missing sum is off by a factor of 2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.parallel import MicroBatch, ParallelGroups, ParallelLayout, forward_backward
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt
from tests.effort import is_thorough
from tests.gradients import Box, assert_all_close, gradient_boxes, join
from tests.huggingface_experts import fill
from tests.huggingface_models import (
    RELATIVE,
    arrays_in_our_names,
    assert_close,
    logits_of,
    random_config,
    random_model,
    reference,
    token_ids,
)

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(6 if is_thorough() else 2)


class Case(NamedTuple):
    """A random model of transformers: our config, its weights, and what it computes."""

    config: GPTConfig
    weights: Mapping[str, Any]  # numpy's, which need no shared memory
    logits: Tensor
    gradients: Mapping[str, Tensor]


@functools.cache
def case(seed: int) -> Case:
    config, arrays, logits = reference("deepseek_v3", seed)
    weights = {key: array.detach().numpy().copy() for key, array in arrays.items()}
    model = random_model(random_config("deepseek_v3", seed), seed)
    tokens, labels = batch(config)
    F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    gradients = {key: g for key, g in arrays_in_our_names(model).items() if "expert_bias" not in key}
    return Case(config, weights, logits, gradients)


def batch(config: GPTConfig) -> MicroBatch:
    tokens = token_ids(config.vocab_size)
    return MicroBatch(tokens, tokens.flip(1).roll(3, 1))


def run(
    cases: list[tuple[GPTConfig, Any]], layout: ParallelLayout
) -> list[tuple[Any, list[tuple[Any, ...]]]]:
    """Return this rank's logits and gradients of each case."""
    results = []
    for config, weights in cases:
        groups = ParallelGroups.create(layout)
        model = build_gpt(config, groups, sequence_parallel=layout.tp > 1)
        declared = model.sharded_state_dict()
        fill(declared, {key: torch.from_numpy(array) for key, array in weights.items()})
        logits = logits_of(model, config, groups)
        whole = batch(config)
        share = MicroBatch(*(x.chunk(groups.dp.size)[groups.dp.rank] for x in whole))
        forward_backward(model, [share], groups)
        boxes = gradient_boxes(model, declared, groups)
        results.append((logits, [(*box[:3], box.data.numpy()) for box in boxes]))
    return results


def check(ranks: list[list[tuple[Any, list[tuple[Any, ...]]]]], layout: ParallelLayout) -> None:
    for seed, results in zip(SEEDS, zip(*ranks, strict=True), strict=True):
        expected = case(seed)
        compared = 0
        for rank, (logits, _) in enumerate(results):
            if logits is not None:
                assert_close(logits, expected.logits.chunk(layout.dp)[layout.coordinates(rank).dp])
                compared += 1
        assert compared == layout.world_size // layout.pp
        boxes = [Box(*box[:3], torch.from_numpy(box[3])) for _, own in results for box in own]
        gradients = join(boxes)
        for key in gradients.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
            gradients[key], padding = gradients[key].split_with_sizes(
                [expected.config.vocab_size, len(gradients[key]) - expected.config.vocab_size]
            )
            assert not padding.any()
        assert_all_close(gradients, expected.gradients, relative=RELATIVE)


def test_seeds_have_all_kinds_of_the_family() -> None:
    configs = [random_config("deepseek_v3", seed) for seed in range(6)]
    for field in ("q_lora_rank", "rope_interleave", "attention_bias", "norm_topk_prob"):
        assert {bool(getattr(config, field)) for config in configs} == {True, False}, field
    assert {config.rope_parameters["rope_type"] for config in configs} == {"default", "yarn"}
    assert {0, 1} <= {config.first_k_dense_replace for config in configs}
    assert any(config.topk_group < config.n_group for config in configs)


def test_one_rank_computes_logits_and_gradients_of_transformers() -> None:
    cases = [(case(seed).config, case(seed).weights) for seed in SEEDS]
    check([run(cases, ParallelLayout())], ParallelLayout())


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_logits_and_gradients_of_transformers(rank_pool: RankPool, name: str) -> None:
    cases = [(case(seed).config, case(seed).weights) for seed in SEEDS]
    check(rank_pool.run(run, 2, cases, LAYOUTS[name]), LAYOUTS[name])
