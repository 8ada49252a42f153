"""Models with layers of several kinds go on training at other layouts as if nothing had happened.

30 steps, with a save, and a load into new processes' models, at every fifth one. As long as the layout stays,
losses are bit-equal to those of a run that is not interrupted.

Tolerance at other layouts: everything is float32 and only the order of sums differs, about 1e-6 of a
gradient. Each step adds such a difference to the weights, and the losses that follow depend on all of them:
1e-4 leaves room for 30 steps. An optimizer whose moments were lost is off by parts of a hundred.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import LoadOptions
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import (
    ParallelGroups,
    ParallelLayout,
    all_reduce,
    forward_backward,
    share_losses,
    update_expert_bias,
)
from megackpt.testing.ranks import RankPool
from tests.support.effort import with_all
from tests.support.gpt import DELTA_NET, HYBRID, LATENT, MAMBA, Case, build, micro_batches, state_of

RELATIVE = 1e-4
STEPS, INTERVAL = 30, 5
MICRO_BATCHES = 2
CONFIGS = {"latent": LATENT, "delta_net": DELTA_NET, "mamba": MAMBA, "hybrid": HYBRID}
ONE = Case(ParallelLayout())
LAYOUTS = [
    ONE,
    ONE,
    Case(ParallelLayout(tp=2, cp=2), sequence_parallel=True),
    Case(ParallelLayout(cp=2, dp=2, ep=2)),
    Case(ParallelLayout(pp=2, vpp=2), stages="Et|t|t|tL"),
    Case(ParallelLayout(tp=2, pp=2, ep=2, etp=1), sequence_parallel=True),
]


def train(model_name: str, case: Case, steps: range, source: Path | None, target: Path | None) -> list[float]:
    """Return the mean losses of some steps, from a checkpoint on or from the start, and save at the end."""
    groups = ParallelGroups.create(case.layout)
    model = build(case, CONFIGS[model_name], groups, seed=1 if source is None else 2)
    params = [{"name": "all", "params": list(model.parameters())}]
    optimizer = DistributedOptimizer(params, _adam, groups, bucket_size=1001)
    if source is not None:
        loaded = megackpt.load(state_of(model, optimizer), source, options=LoadOptions(complete=True))
        optimizer.load_sharded_state_dict(loaded["optimizer"])
    losses = []
    for step in steps:
        batches = micro_batches(groups, seed=step % INTERVAL, count=MICRO_BATCHES)
        shares = share_losses(forward_backward(model, batches, groups), len(batches), groups)
        losses.append(float(all_reduce(shares.mean(), groups.dp_cp)) / groups.dp_cp.size)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(model, groups)
    if target is not None:
        megackpt.save(state_of(model, optimizer), target)
    return losses


def _adam(params: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.003)


@with_all("layout pairs load and save these families")
@pytest.mark.parametrize("model_name", CONFIGS)
def test_a_run_whose_layout_changes_has_the_losses_of_one_that_is_not_interrupted(
    rank_pool: RankPool, tmp_path: Path, model_name: str
) -> None:
    (expected,) = rank_pool.run(train, 1, model_name, ONE, range(STEPS), None, None)
    assert expected[-1] < expected[0]
    source = None
    for start, case in zip(range(0, STEPS, INTERVAL), LAYOUTS, strict=True):
        target, steps = tmp_path / str(start), range(start, start + INTERVAL)
        ranks = rank_pool.run(train, case.layout.world_size, model_name, case, steps, source, target)
        for losses in ranks:
            tolerance = 0.0 if case == ONE else RELATIVE
            assert losses == pytest.approx(expected[start : start + INTERVAL], rel=tolerance, abs=0.0), case
        source = target
