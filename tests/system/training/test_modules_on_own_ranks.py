"""An encoder and a decoder, each on ranks of its own with an optimizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt import Checkpointer, LoadOptions, load_common_state_dict, load_plain_tensors
from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    ColumnParallelLinear,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    ShardedModule,
)

Ranks = tuple[int, ...]
Layouts = dict[str, tuple[ParallelLayout, Ranks]]
"""Layout and global ranks of each module."""

SAVED: Layouts = {
    "encoder": (ParallelLayout(tp=2), (0, 1)),
    "decoder": (ParallelLayout(tp=2, dp=2), (2, 3, 4, 5)),
}
ONE_RANK: Layouts = {"encoder": (ParallelLayout(), (0,)), "decoder": (ParallelLayout(), (0,))}
THREE_RANKS: Layouts = {
    "encoder": (ParallelLayout(), (2,)),
    "decoder": (ParallelLayout(dp=2), (0, 1)),
}
NEITHER_ON_RANK_0: Layouts = {
    "encoder": (ParallelLayout(dp=2), (1, 3)),
    "decoder": (ParallelLayout(tp=2), (1, 2)),  # rank 1 has both
}


class Block(ShardedModule):
    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.up = ColumnParallelLinear(8, 16, groups)
        self.down = RowParallelLinear(16, 8, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Part:
    """A module on this rank, with its optimizer."""

    def __init__(self, name: str, groups: ParallelGroups) -> None:
        self.name = name
        torch.manual_seed(1 + groups.tp.rank)
        self.module = Block(groups)
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim == 1]
        named = [
            {"params": matrices, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "name": "rest"},
        ]
        rate = 0.01 if name == "encoder" else 0.02
        self.optimizer = DistributedOptimizer(
            named, lambda of_groups: torch.optim.AdamW(of_groups, lr=rate), groups, overlap_grad_reduce=True
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(step))
            self.module(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> ShardedStateDict:
        declared = self.module.sharded_state_dict(f"{self.name}.")
        return {"model": declared, "optimizer": self.optimizer.sharded_state_dict(declared)}


def parts_of(layouts: Layouts) -> list[Part]:
    groups = {name: ParallelGroups.create_on(ranks, layout) for name, (layout, ranks) in layouts.items()}
    return [Part(name, of_module) for name, of_module in groups.items() if of_module is not None]


def train_and_save(layouts: Layouts, root: Path) -> None:
    parts = parts_of(layouts)
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in (1, 2):  # the second with the plan of the first
            for part in parts:
                part.train(2)
            checkpointer.save(step, {part.name: part.state() for part in parts})


def resume_and_save(layouts: Layouts, root: Path, copy: Path) -> None:
    parts = parts_of(layouts)
    state = {part.name: part.state() for part in parts}
    loaded = Checkpointer(root, load_options=LoadOptions(complete=True)).load(state)
    for part in parts:
        part.optimizer.load_sharded_state_dict(loaded[part.name]["optimizer"])
    Checkpointer(copy).save(2, {part.name: part.state() for part in parts})
    for part in parts:
        part.train(1)


@pytest.mark.parametrize(("layouts", "ranks"), [(ONE_RANK, 1), (THREE_RANKS, 3), (NEITHER_ON_RANK_0, 4)])
def test_modules_are_saved_and_resumed_on_other_ranks(
    rank_pool: RankPool, tmp_path: Path, layouts: Layouts, ranks: int
) -> None:
    rank_pool.run(train_and_save, 6, SAVED, tmp_path / "run")
    rank_pool.run(resume_and_save, ranks, layouts, tmp_path / "run", tmp_path / "copy")
    step = "iter_0000002"
    saved, copied = (load_plain_tensors(tmp_path / name / step) for name in ("run", "copy"))
    assert saved.keys() == copied.keys()
    assert [key for key in saved if not torch.equal(saved[key], copied[key])] == []
    common: list[Any] = [load_common_state_dict(tmp_path / name / step) for name in ("run", "copy")]
    for name, rate in (("encoder", 0.01), ("decoder", 0.02)):
        groups = [of_run[name]["optimizer"]["param_groups"] for of_run in common]
        assert groups[0] == groups[1]
        assert {name: group["lr"] for name, group in groups[0].items()} == {"matrices": rate, "rest": rate}


def wrong_groups() -> list[str]:
    texts = []
    for layout, ranks in (
        (ParallelLayout(tp=2), (0, 1, 2)),
        (ParallelLayout(tp=2), (0, 7)),
        (ParallelLayout(), (3,)),
    ):
        try:
            ParallelGroups.create_on(ranks, layout)
        except (DeclarationError, MismatchError) as error:
            texts.append(str(error))
    return texts


def test_groups_that_cannot_be_are_an_error(rank_pool: RankPool) -> None:
    for count, outside, twice in rank_pool.run(wrong_groups, 2):
        assert "needs 2 ranks, but ranks=(0, 1, 2) are 3" in count
        assert "each must be another one of the 2 that run" in outside
        assert "each must be another one" in twice


def take_twice() -> str:
    groups = ParallelGroups.create_on((0, 1), ParallelLayout(dp=2))
    assert groups is not None
    groups.with_own_process_groups("dp_cp")
    with pytest.raises(DeclarationError, match="Create groups for each such optimizer") as caught:
        groups.with_own_process_groups("dp_cp")
    return str(caught.value)


def test_a_second_optimizer_that_overlaps_needs_groups_of_its_own(rank_pool: RankPool) -> None:
    assert all("dp_cp" in text for text in rank_pool.run(take_twice, 2))
