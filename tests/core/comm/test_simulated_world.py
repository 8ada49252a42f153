"""The error of a rank that reaches the user of a simulated world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import DeclarationError, RankFailedError, ShardedTensor, save
from megackpt.comm import Group
from megackpt.testing.world import SimulatedWorld


def test_the_error_of_a_rank_comes_before_those_of_ranks_that_wait_for_it(tmp_path: Path) -> None:
    def on_rank(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("of the user")
        save({}, tmp_path, group=group)

    with pytest.raises(KeyError, match="of the user"):
        SimulatedWorld(3).run(on_rank)

    def declares(group: Group) -> None:
        cut = (0, group.rank + 1, 2)
        save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), cut)}, tmp_path, group=group)

    with pytest.raises(DeclarationError, match="invalid rank offset"):
        SimulatedWorld(2).run(declares)


def test_a_rank_that_has_ended_early_is_named_at_once() -> None:
    def on_rank(group: Group) -> None:
        if group.rank == 0:
            group.all_gather(b"")

    with pytest.raises(RankFailedError, match=r"rank\(s\) \[1\] ended without this step"):
        SimulatedWorld(2).run(on_rank)
