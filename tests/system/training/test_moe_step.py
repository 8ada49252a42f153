"""Gradients, norm, clipping and biases of a GPT with experts at layouts of 8 ranks: those of one process.

Each layout has one model and one optimizer, with `--all` both models and both optimizers.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of about
tokens * layers * width = 128 * 4 * 32 = 16384 rounded terms; random rounding errors add up to sqrt(16384) *
2^-24 = 8e-6 of the largest element of its array. The norm is a sum in fp64 over all
elements, whose errors average out. A wrong or missing reduction is off by a factor of two.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from megackpt.mapping import ShardedStateDict, ShardedTensor
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout, forward_backward, update_expert_bias
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled, tries_all
from tests.support.gpt import (
    ALL_MOE,
    CONFIG,
    LAYOUTS,
    Case,
    assert_all_close,
    build,
    gradient_boxes,
    join,
    micro_batches,
    state_of,
)
from tests.support.optimizers import Arrays, gather, tensors_of

CLIP_GRAD = 0.05
RELATIVE, RELATIVE_OF_NORM = 1e-5, 1e-6
PREFIX = "optimizer.state.momentum_buffer."
CONFIGS = {"mixed": CONFIG, "all": ALL_MOE}
MODEL_OF = dict(zip(LAYOUTS, ["all", "mixed"] * 7, strict=True))
OPTIMIZERS = (DistributedOptimizer, MixedPrecisionOptimizer)
CASES = [
    pytest.param(replace(case, optimizer=optimizer), kind, id=f"{name}-{kind}-{optimizer.__name__}")
    for (name, case), kind, optimizer in itertools.product(LAYOUTS.items(), CONFIGS, OPTIMIZERS)
    if tries_all() or (kind == MODEL_OF[name] and optimizer == case.optimizer)
]


def run_step(case: Case, kind: str) -> tuple[float, list[ShardedTensor]]:
    """Take one step; return the norm, and this rank's part of the optimizer's state and of the biases.

    After the first step, the momentum is the reduced and clipped gradient.
    """
    groups = ParallelGroups.create(case.layout)
    model = build(case, CONFIGS[kind], groups, seed=11)
    optimizer = case.optimizer(
        model.parameters(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        groups,
        clip_grad=CLIP_GRAD,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    forward_backward(model, micro_batches(groups), groups)
    norm = float(optimizer.step())
    update_expert_bias(model, groups)
    state = state_of(model, optimizer)
    return norm, tensors_of(state["optimizer"]) + biases_of(state["model"])


def biases_of(declared: ShardedStateDict) -> list[ShardedTensor]:
    return [tensor for tensor in tensors_of(declared) if tensor.key.endswith(".expert_bias")]


@functools.cache
def reference(kind: str) -> tuple[float, Arrays, Arrays]:
    """Return the norm and the clipped gradients of plain torch in one process, and the biases after it."""
    groups = ParallelGroups.create(ParallelLayout())
    model = build(Case(groups.layout), CONFIGS[kind], groups, seed=11)
    forward_backward(model, micro_batches(groups), groups)
    params = list(model.parameters())
    norm = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None) ** 0.5
    torch.nn.utils.clip_grad_norm_(params, CLIP_GRAD)
    declared = model.sharded_state_dict()
    update_expert_bias(model, groups)
    return norm, join(gradient_boxes(model, declared, groups)), gather([{"": biases_of(declared)}])


@sampled(8)
@pytest.mark.parametrize(("case", "kind"), CASES)
def test_norm_clipped_gradients_and_biases_are_those_of_one_process(
    rank_pool: RankPool, case: Case, kind: str
) -> None:
    norm, expected, biases = reference(kind)
    assert norm > 2 * CLIP_GRAD
    results = rank_pool.run(run_step, case.layout.world_size, case, kind)
    for norm_of_rank, _ in results:
        assert norm_of_rank == pytest.approx(norm, rel=RELATIVE_OF_NORM)
        assert norm_of_rank == results[0][0]
    state = gather([{"optimizer": tensors} for _, tensors in results])
    rows = CONFIG.vocab_size  # without padding
    actual = {
        key.removeprefix(PREFIX): array[:rows] if "word_embeddings" in key else array
        for key, array in state.items()
        if key.startswith(PREFIX)
    }
    assert_all_close(actual, expected, relative=RELATIVE)
    assert biases
    for key, bias in biases.items():
        assert bool(bias.any())
        assert torch.equal(state[key], bias), key  # counts of tokens are exact
