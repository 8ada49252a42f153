"""Dense and expert parameters and their optimizer at each layout take the step of one process.

Exchanges that overlap with the model's computation give the same bits as exchanges in the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from megackpt.entities import ShardedTensor
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import is_marked
from tests.support.effort import sampled
from tests.support.expert_world import TinyMoE, build, random_weights, tokens_of
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


MICRO_BATCHES = 2
NEVER = 99  # more micro-batches than there are: everything is reduced in the step
OVERLAP_LAYOUTS = [
    ParallelLayout(dp=4, ep=2),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1),
    ParallelLayout(cp=2, dp=2, etp=2),
    # Tokens are exchanged over the ranks that dense gradients are reduced over, and one rank gets none.
    ParallelLayout(dp=8, ep=8),
]
Run = tuple[list[ShardedTensor], list[int]]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def layers_of(model: TinyMoE) -> list[nn.Module]:
    return [*(layer for chunk in model.chunks for layer in chunk), model.head]


def train(
    layout: ParallelLayout,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    micro_batches: int,
    clip_grad: float,
    dtype: torch.dtype,
) -> Run:
    """Train; return weights and state of this rank, and how much was under way at some moments."""
    groups = ParallelGroups.create(layout)
    model = build(groups, random_weights(seed=1), dtype)
    optimizer = DistributedOptimizer(
        model.parameters(),
        adamw,
        groups,
        clip_grad=clip_grad,
        bucket_size=150,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=layers_of(model) if overlap_param_gather else (),
    )
    optimizer.micro_batches = micro_batches
    under_way: list[int] = []
    for step in range(3):
        for micro_batch in range(MICRO_BATCHES):
            x, expert_of = tokens_of(groups, step=10 * step + micro_batch)
            model(x.to(dtype), expert_of).backward()
            under_way.append(len(optimizer._reductions._running) if optimizer._reductions else 0)
        optimizer.step()
        optimizer.zero_grad()
        under_way.append(len(optimizer._gathers._running) if optimizer._gathers else 0)
    declared = model.sharded_state_dict()
    return tensors_of([optimizer.sharded_state_dict(declared), declared]), under_way


def are_equal(a: list[Run], b: list[Run]) -> bool:
    pairs = [pair for (x, _), (y, _) in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return len(pairs) > 80 and all(
        s.key == t.key and s.data is not None and t.data is not None and torch.equal(s.data, t.data)
        for s, t in pairs
    )


def moments(ranks: list[Run], index: int) -> set[int]:
    """Return what was under way on all ranks: at index 0 after the first micro-batch of a step, and so on."""
    return {n for _, under_way in ranks for n in under_way[index :: MICRO_BATCHES + 1]}


@sampled(12)
@pytest.mark.parametrize(("clip_grad", "dtype"), [(0.0, torch.float32), (0.3, torch.bfloat16)])
@pytest.mark.parametrize("layout", OVERLAP_LAYOUTS, ids=str)
def test_overlap_changes_no_bit(
    rank_pool: RankPool, layout: ParallelLayout, clip_grad: float, dtype: torch.dtype
) -> None:
    def run(*overlap: bool, micro_batches: int = MICRO_BATCHES) -> list[Run]:
        return rank_pool.run(train, layout.world_size, layout, *overlap, micro_batches, clip_grad, dtype)

    plain, gathers = run(False, False), run(False, True)
    late, early = run(True, False, micro_batches=NEVER), run(True, False)
    both = run(True, True)
    assert are_equal(gathers, plain)
    assert are_equal(early, late)
    assert are_equal(both, late)
    if layout.tp == layout.etp == 1:  # nothing is summed before: the buffers are the same
        assert are_equal(late, plain)
    first, second = (gather([{"all": tensors} for tensors, _ in ranks]) for ranks in (plain, late))
    for key, array in first.items():
        # Shards end elsewhere, and a kernel may round the end of a shard unlike its middle.
        torch.testing.assert_close(second[key], array, rtol=1e-2 if array.dtype == dtype else 1e-5, atol=1e-5)
    assert moments(plain, 1) == moments(early, 0) == moments(late, 1) == moments(early, 2) == {0}
    assert max(moments(early, 1)) > 0
    assert min(moments(early, 1)) > 0 or layout.ep == 8  # a rank without tokens starts nothing early
    assert min(moments(both, 2)) > 0


def touch_some(overlap: bool) -> list[list[float]]:
    """Each rank touches other parameters, in another order; some nobody touches."""
    groups = ParallelGroups.create(ParallelLayout(dp=4, ep=2))
    dense = [Parameter(torch.ones(70)) for _ in range(5)]
    experts = [Parameter(torch.ones(70)) for _ in range(5)]
    for param in experts:
        param.expert_parallel = True  # type: ignore[attr-defined]
    params = [p for pair in zip(dense, experts, strict=True) for p in pair]
    optimizer = DistributedOptimizer(
        params,
        lambda g: torch.optim.SGD(g, lr=0.5, weight_decay=0.25),
        groups,
        bucket_size=100,
        overlap_grad_reduce=overlap,
    )
    rank = groups.rank
    for step in range(3):
        for position, param in enumerate(params if rank % 2 else params[::-1]):
            if (position + rank + step) % 3 == 0 and position != 4:
                (param * (rank + 1)).sum().backward()
        if step == 1:
            optimizer.skip_step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().tolist() for p in params]


def test_ranks_that_touch_other_parameters_in_another_order_do_not_wait_for_each_other(
    rank_pool: RankPool,
) -> None:
    assert rank_pool.run(touch_some, 4, True) == rank_pool.run(touch_some, 4, False)
