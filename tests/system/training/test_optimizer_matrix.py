"""Every optimizer in every wrapper, resumed at every change of layout.

Three steps equal those of the uninterrupted run, or `expected` gives the reason. The table in
docs/optimizers.md is that of `expected`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt.testing.ranks import RankPool
from megackpt.training.parallel.layout import ParallelLayout
from tests.support.effort import sampled, tries_all
from tests.support.optimizers import gather
from tests.system.training.optimizer_matrix import OPTIMIZERS, Result, run

CHANGES = {
    "same": (ParallelLayout(dp=2), ParallelLayout(dp=2)),
    "tp": (ParallelLayout(dp=2), ParallelLayout(tp=2)),
    "pp": (ParallelLayout(dp=2), ParallelLayout(pp=2)),
    "dp": (ParallelLayout(dp=2), ParallelLayout(dp=4)),
    "ep": (ParallelLayout(dp=2, ep=2), ParallelLayout(dp=2)),
}
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("Adafactor", "Muon", "LBFGS")]
SAMPLE = ["AdamW", "SGD, momentum", "Adafactor", "Muon", "LBFGS"]


def expected(name: str, wrapper: str, change: str) -> str:
    """Return `exact`, the name of an error, or `state` if the state is exact and the steps are not."""
    if name == "LBFGS" or (wrapper == "distributed" and name not in ELEMENTWISE):
        return "OptimizerError"  # when the optimizer is made
    if name == "Adafactor" and change in ("tp", "ep"):
        return "MismatchError"  # factors are those of a slice
    if name == "Muon" and change == "tp":
        return "state"  # each slice is orthogonalised by itself
    return "exact"


def names_to_try() -> list[str]:
    names = list(OPTIMIZERS) if tries_all() else SAMPLE
    return [name for name in names if name != "Muon" or hasattr(torch.optim, "Muon")]


def outcome(first: list[Result], second: list[Result]) -> str:
    """Compare what the ranks of both runs have, after the load and at the end."""
    for results in (first, second):
        errors = {result for result in results if isinstance(result, str)}
        if errors:
            assert len(errors) == 1
            return errors.pop()
    are_equal = [have_equal_arrays(first, second, at) for at in (0, 1)]
    return {(True, True): "exact", (True, False): "state"}.get(tuple(are_equal), "differs")


def have_equal_arrays(first: list[Result], second: list[Result], at: int) -> bool:
    whole, resumed = [gather([{"all": result[at]} for result in r]) for r in (first, second)]
    assert whole.keys() == resumed.keys()
    return all(torch.equal(whole[key], resumed[key]) for key in whole)


@sampled(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapper", ["distributed", "owner", "whole"])
def test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run(
    rank_pool: RankPool, memory_path: Path, wrapper: str, change: str
) -> None:
    source, target = CHANGES[change]
    names, moe = names_to_try(), change == "ep"
    first = rank_pool.run(run, source.world_size, names, wrapper, source, memory_path, False, moe)
    second = rank_pool.run(run, target.world_size, names, wrapper, target, memory_path, True, moe)
    got = {name: outcome([r[name] for r in first], [r[name] for r in second]) for name in names}
    assert got == {name: expected(name, wrapper, change) for name in names}
