"""A sample of the matrix of other libraries' optimizers on processes of their own, with real saves and loads.

All cells are in tests/contrib/apex/test_foreign_optimizer_matrix.py, which has all ranks in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import CheckpointError, load, save
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.contrib.apex.foreign_optimizers import CHANGES, SAVED_AFTER, STEPS, Rank
from tests.contrib.apex.test_foreign_optimizer_matrix import KINDS, DenseAndExperts, expected
from tests.support.effort import sampled
from tests.system.training.optimizer_matrix import Result, copies_of
from tests.system.training.test_optimizer_matrix import outcome

SAMPLE = [
    "FusedAdam",
    "FusedSGD",
    "FusedNovoGrad",
    "FusedMixedPrecisionLamb",
    "DistributedFusedAdam",
    "DistributedFusedAdam, remainders",
    "CPUOffloadOptimizer",
]


@sampled(8)
@pytest.mark.parametrize("change", ["same", "tp", "dp", "ep"])
def test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run(
    rank_pool: RankPool, memory_path: Path, change: str
) -> None:
    source, target = CHANGES[change]
    first = rank_pool.run(_run, source.world_size, source, memory_path, False, change == "ep")
    second = rank_pool.run(_run, target.world_size, target, memory_path, True, change == "ep")
    got = {name: outcome([r[name] for r in first], [r[name] for r in second]) for name in SAMPLE}
    assert got == {name: expected(name, change) for name in SAMPLE}


def _run(layout: ParallelLayout, path: Path, resumes: bool, moe: bool) -> dict[str, Result]:
    groups = ParallelGroups.create(layout)
    return {name: _run_one(name, groups, path / name, resumes=resumes, moe=moe) for name in SAMPLE}


def _run_one(name: str, groups: ParallelGroups, path: Path, *, resumes: bool, moe: bool) -> Result:
    rank = Rank(KINDS[name], groups, 7 if resumes else 1, moe=moe)
    if resumes:
        try:
            state = load(rank.declare(is_loading=True), path)
        except CheckpointError as error:
            return type(error).__name__
        rank.kind.restore(rank.optimizer, state["optimizer"])
    else:
        _train(rank, range(SAVED_AFTER))
        save(rank.declare(), path)
    saved = copies_of(rank.declare())
    _train(rank, range(SAVED_AFTER, STEPS))
    return saved, copies_of(rank.declare())


def _train(rank: Rank, steps: range) -> None:
    axes = {"dp": rank.groups.dp, "edp": rank.groups.edp}
    for number in steps:
        rank.step(number)
        if isinstance(rank.optimizer, DenseAndExperts):
            for name, optimizer in rank.optimizer.of_axis.items():
                _share(optimizer, axes[name])


@torch.no_grad()
def _share(optimizer: Any, axis: Axis) -> None:
    """Give every rank the parameters of all shards, as Apex's gather after a step does."""
    for param in optimizer.parameters() if axis.size > 1 else ():
        own = torch.zeros(param.numel())
        for fragment in optimizer.state[param]["fragments"]:
            if fragment.in_local_shard:
                part = slice(*fragment.shard_param_range)
                own[part] = param.view(-1)[part].float()
        dist.all_reduce(own, group=axis.group)  # exact: all but one rank add zero
        param.copy_(own.view(param.shape))
