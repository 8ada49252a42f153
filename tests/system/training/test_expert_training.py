"""Gradients, global norm and clipping of dense and expert parameters at each layout: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megackpt.mapping import ShardedTensor
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel.attributes import is_marked
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.support.expert_world import build, random_weights, tokens_of
from tests.support.optimizers import Arrays, elements_of, gather, tensors_of

Kind = type[MasterOptimizer]
LAYOUTS = [
    ParallelLayout(dp=4, ep=4),
    ParallelLayout(tp=2, dp=2, ep=2),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1),
    ParallelLayout(tp=2, cp=2, ep=1, etp=4),
    ParallelLayout(cp=2, dp=2, ep=2),
    ParallelLayout(tp=1, dp=4, etp=2, ep=2),
]
LARGE_LAYOUTS = [ParallelLayout(tp=2, cp=2, dp=2, ep=8, etp=1), ParallelLayout(cp=2, dp=4, ep=2, etp=2)]

PIPELINES = [
    ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=1),
    ParallelLayout(pp=2, cp=2, dp=2, ep=2, etp=2, vpp=2),
    ParallelLayout(tp=2, pp=2, dp=2, etp=4),
]


def sgd(groups: Any) -> torch.optim.Optimizer:
    # The learning rate is 1: the weights after a step differ as the gradients do. Weight decay shows whether
    # an expert without tokens is updated with the others of its stack.
    return torch.optim.SGD(groups, lr=1.0, weight_decay=0.1)


def run_step(
    kind: Kind, layout: ParallelLayout, clip_grad: float
) -> tuple[float, list[ShardedTensor], list[ShardedTensor]]:
    """Take one step; return the norm, this rank's part of the weights then, and of the numbers of steps."""
    groups = ParallelGroups.create(layout)
    model = build(groups, random_weights(seed=1), torch.float64)
    optimizer = kind(model.parameters(), sgd, groups, clip_grad=clip_grad, bucket_size=150)
    x, expert_of = tokens_of(groups, step=3)
    model(x.double(), expert_of).backward()
    norm = float(optimizer.step())
    declared = model.sharded_state_dict()
    return norm, tensors_of(declared), tensors_of(optimizer.sharded_state_dict(declared))


@pytest.fixture(scope="module")
def reference() -> dict[float, tuple[float, Arrays]]:
    """The norm and the weights after a step of plain torch in one process, by the largest norm."""
    results = {}
    for clip_grad in (0.0, 0.5):
        alone = ParallelGroups.offline(ParallelLayout(), 0)
        model = build(alone, random_weights(seed=1), torch.float64)
        x, expert_of = tokens_of(alone, step=3)
        model(x.double(), expert_of).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or 1e9))
        sgd(model.parameters()).step()
        results[clip_grad] = norm, gather([model.sharded_state_dict()])
    return results


@sampled(8)
@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE_LAYOUTS], ids=str)
@pytest.mark.parametrize("kind", [DistributedOptimizer, MixedPrecisionOptimizer])
def test_a_step_equals_that_of_one_process(
    rank_pool: RankPool, kind: Kind, layout: ParallelLayout, reference: dict[float, tuple[float, Arrays]]
) -> None:
    for clip_grad, (norm, weights) in reference.items():
        results = rank_pool.run(run_step, layout.world_size, kind, layout, clip_grad)
        assert norm > 0.5
        for got_norm, _, _ in results:
            assert got_norm == pytest.approx(norm, rel=1e-12)  # in fp64: only the order of sums differs
            assert got_norm == results[0][0]
        got = gather([{"model": tensors} for _, tensors, _ in results])
        assert got.keys() == weights.keys()
        for tensor in (tensor for _, tensors, _ in results for tensor in tensors):  # replicas, too
            assert tensor.data is not None
            wanted = weights[tensor.key].reshape(-1)[elements_of(tensor)]
            torch.testing.assert_close(tensor.data.detach().reshape(-1), wanted, rtol=1e-10, atol=1e-12)
        state = gather([{"optimizer": tensors} for _, _, tensors in results])
        assert all(bool((steps == 1).all()) for key, steps in state.items() if ".step." in key)


def run_given_grads(kind: Kind, layout: ParallelLayout) -> tuple[float, list[ShardedTensor]]:
    """Step on gradients of which each rank has such a part that the whole is known."""
    groups = ParallelGroups.create(layout)
    model = build(groups, random_weights(seed=1), torch.float64)
    grads = build(groups, random_weights(seed=2), torch.float64)  # a model, for its cuts
    optimizer = kind(model.parameters(), sgd, groups, clip_grad=1.0, bucket_size=150)
    for param, grad in zip(model.parameters(), grads.parameters(), strict=True):
        share = 1.0
        if is_marked(param, "expert_parallel"):
            share = layout.dp * layout.cp / layout.edp
        if is_marked(param, "sequence_parallel"):
            share /= layout.etp if is_marked(param, "expert_parallel") else layout.tp
        param.grad = grad.detach() * share
    return float(optimizer.step()), tensors_of(model.sharded_state_dict())


@sampled(4)
@pytest.mark.parametrize("layout", PIPELINES, ids=str)
@pytest.mark.parametrize("kind", [DistributedOptimizer, MixedPrecisionOptimizer])
def test_the_norm_counts_every_element_of_all_stages_once(
    rank_pool: RankPool, kind: Kind, layout: ParallelLayout
) -> None:
    weights, grads = random_weights(seed=1), random_weights(seed=2)
    norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    results = rank_pool.run(run_given_grads, layout.world_size, kind, layout)
    got = gather([{"model": tensors} for _, tensors in results])
    for got_norm, _ in results:
        assert got_norm == pytest.approx(norm, rel=1e-12)  # in fp64: only the order of sums differs
    for key, weight in weights.items():
        wanted = 0.9 * weight.double() - grads[key].double() / (norm + 1e-6)
        torch.testing.assert_close(got[key], wanted, rtol=1e-10, atol=1e-12)
