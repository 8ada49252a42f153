"""The table of what a state dict declares, and what it shows of fused weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedLayout, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.testing.world import SimulatedWorld

GATE, UP = torch.zeros(4, 2), torch.ones(4, 2)


def part_of(rank: int) -> torch.Tensor:
    return torch.cat([GATE.chunk(2)[rank], UP.chunk(2)[rank]])


def test_all_kinds_are_listed_with_sizes_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flat = torch.zeros(3)
    state = {
        "cut": ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 3)),
        "copy": ShardedTensor.from_rank_offsets("norm", torch.zeros(4), replica_id=(0, 0, 1)),
        "flat": ShardedTensor.from_rank_offsets_flat("m", flat, (2, 3), flattened_range=slice(1, 4)),
        "seen": ShardedObject("seen", 1, (1,), (0,)),
        "args": {"lr": 0.1, "mean": torch.zeros(5)},
    }
    report = megackpt.check(state)
    assert [(a.key, a.kind, a.nbytes, a.writes) for a in report.arrays] == [
        ("w", "cut", 32, True),
        ("norm", "whole", 16, False),
        ("m", "cut", 12, True),
    ]
    assert report.objects == ("seen/shard_0_1",)
    assert (report.common, report.common_nbytes) == (("args.lr", "args.mean"), 20)
    text = str(report)
    assert "[4:8, 0:2]" in text
    assert "[0:2, 0:3] flat 1:4" in text
    assert (
        "arrays: 2 cut (44 bytes), 1 whole (16 bytes); objects: 1; common state: 2 leaves (20 bytes)" in text
    )
    assert not report.suspects
    assert not list(tmp_path.iterdir())


def test_a_fused_weight_declared_as_one_cut_is_named_with_a_declaration_that_works(tmp_path: Path) -> None:
    wrong = ShardedTensor.from_rank_offsets("mlp.gate_up.weight", part_of(1), (0, 1, 2))
    (suspicion,) = megackpt.check({"w": wrong}).suspects
    assert "tp=1 reads [0:4) of rank 0, [4:8) of rank 1" in suspicion
    proposed = suspicion[suspicion.index("ShardedLayout.split(") : -1]

    def save_rank(group: Group) -> None:
        call = proposed.replace("(0, 1, 2)", f"(0, {group.rank}, 2)")
        names = {"ShardedLayout": ShardedLayout, "data": part_of(group.rank)}
        save({"w": eval(call, names)}, tmp_path / "c", group=group)

    SimulatedWorld(2).run(save_rank)
    data = torch.full((8, 2), 9.0)
    whole = ShardedLayout.split("mlp.gate_up.weight", data, 0, {"gate": 4, "up": 4})
    report = megackpt.check({"w": whole})
    assert not report.suspects
    assert len(report.fused) == 2
    load({"w": whole}, tmp_path / "c")
    assert torch.equal(data, torch.cat([GATE, UP]))
