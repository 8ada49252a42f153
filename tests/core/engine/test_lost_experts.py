"""An expert that no rank has, or two: an error on all ranks that names the arrays, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megackpt import load, save
from megackpt.errors import CoverageError
from megackpt.mapping import ShardedStateDict
from megackpt.options import LoadOptions
from megackpt.parallel import ExpertStack, GatedExperts, ParallelGroups, ParallelLayout, RowParallelLinear
from megackpt.testing.world import SimulatedRank, SimulatedWorld

LAYOUT = ParallelLayout(dp=4, ep=4)  # experts 0 and 1 on rank 0, and so on
KINDS = {
    "stacked": lambda groups: GatedExperts(8, 6, 4, groups),
    "modules": lambda groups: ExpertStack(lambda index: RowParallelLinear(4, 6, groups.experts), 8, groups),
}
KEYS = {"stacked": "experts.linear_fc2.weight", "modules": "experts.weight"}

Declare = Callable[[str, int], ShardedStateDict]


def _state(kind: str, rank: int) -> ShardedStateDict:
    return KINDS[kind](ParallelGroups.offline(LAYOUT, rank)).sharded_state_dict("experts.")


def _lost(kind: str, rank: int) -> ShardedStateDict:
    """Rank 2 leaves out its experts."""
    return {} if rank == 2 else _state(kind, rank)


def _twice(kind: str, rank: int) -> ShardedStateDict:
    """Rank 2 has the experts of rank 1."""
    return _state(kind, 1 if rank == 2 else rank)


FAULTS = {
    "lost": (_lost, r"elements \[4:6, .*\] are {} by no rank"),
    "twice": (_twice, r"elements \[2:4, .*\] are {} by more than one main replica \(ranks 1, 2\)"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_names_the_experts_and_writes_nothing(tmp_path: Path, kind: str, fault: str) -> None:
    declare, text = FAULTS[fault]

    def one_rank(group: SimulatedRank) -> None:
        with pytest.raises(CoverageError, match=KEYS[kind]) as caught:
            save(declare(kind, group.rank), tmp_path / "checkpoint", group=group)
        caught.match(text.format("saved"))

    SimulatedWorld(4).run(one_rank)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_complete_load_names_the_experts_before_it_reads(tmp_path: Path, kind: str, fault: str) -> None:
    declare, text = FAULTS[fault]

    def one_rank(group: SimulatedRank) -> None:
        save(_state(kind, group.rank), tmp_path / "checkpoint", group=group)
        state = declare(kind, group.rank)
        with pytest.raises(CoverageError, match=KEYS[kind]) as caught:
            load(state, tmp_path / "checkpoint", group=group, options=LoadOptions(complete=True))
        caught.match(text.format("requested"))

    SimulatedWorld(4).run(one_rank)
