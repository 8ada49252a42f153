"""Exchanges that overlap with the model's computation give the same bits as exchanges in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from megackpt.mapping import ShardedTensor
from megackpt.optim import DistributedOptimizer
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.support.expert_world import TinyMoE, build, random_weights, tokens_of
from tests.support.optimizers import gather, tensors_of

MICRO_BATCHES = 2
NEVER = 99  # more micro-batches than there are: everything is reduced in the step
LAYOUTS = [
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
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
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
