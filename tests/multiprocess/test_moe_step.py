"""Gradients, global norm and clipping of a GPT with experts, at each layout of 8 ranks: those of one process.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of about
tokens * layers * width = 128 * 4 * 32 = 16384 rounded terms; random rounding errors add up to sqrt(16384) *
2^-24 = 8e-6 of the largest element of its array. The norm is a sum in fp64 over all
elements, whose errors average out. A wrong or missing reduction is off by a factor of two.
"""

from __future__ import annotations

import functools

import pytest
import torch

from megackpt.mapping import ShardedTensor
from megackpt.parallel import ParallelGroups, ParallelLayout, forward_backward
from megackpt.testing.ranks import RankPool
from tests.gradients import assert_all_close, gradient_boxes, join
from tests.moe_gpt_world import ALL_MOE, CONFIG, LAYOUTS, Case, build, micro_batches, state_of
from tests.optim_world import Arrays, gather, tensors_of

pytestmark = pytest.mark.multiprocess

CLIP_GRAD = 0.05
RELATIVE, RELATIVE_OF_NORM = 1e-5, 1e-6
PREFIX = "optimizer.state.momentum_buffer."
CONFIGS = {"mixed": CONFIG, "all": ALL_MOE}
MODEL_OF = dict(zip(LAYOUTS, ["all", "mixed"] * 7, strict=True))


def run_step(case: Case, kind: str) -> tuple[float, list[ShardedTensor]]:
    """Take one step; return the norm, and this rank's part of the optimizer's state.

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
    return norm, tensors_of(state_of(model, optimizer)["optimizer"])


@functools.cache
def reference(kind: str) -> tuple[float, Arrays]:
    """The norm and the clipped gradients of plain torch in one process."""
    groups = ParallelGroups.create(ParallelLayout())
    model = build(Case(groups.layout), CONFIGS[kind], groups, seed=11)
    forward_backward(model, micro_batches(groups), groups)
    params = list(model.parameters())
    norm = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None) ** 0.5
    torch.nn.utils.clip_grad_norm_(params, CLIP_GRAD)
    return norm, join(gradient_boxes(model, model.sharded_state_dict(), groups))


@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_and_clipped_gradients_are_those_of_one_process(rank_pool: RankPool, name: str) -> None:
    kind = MODEL_OF[name]
    norm, expected = reference(kind)
    assert norm > 2 * CLIP_GRAD
    results = rank_pool.run(run_step, LAYOUTS[name].layout.world_size, LAYOUTS[name], kind)
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
