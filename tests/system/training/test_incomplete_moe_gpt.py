"""A GPT with experts of which some are on no rank or on two, or layers on no stage or on two.

A save and a complete load end in the same error on every rank, which names arrays and elements, before
anything is written or loaded. Two pipeline stages of two ranks each, between which the experts are divided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import LoadOptions
from megackpt.errors import CoverageError
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.gpt import ALL_MOE, Case, build, state_of
from tests.support.optimizers import tensors_of

LAYOUT = ParallelLayout(pp=2, dp=2, ep=2)
TABLE, STALE = "Ett|ttL", "Ettt|tL"
EXPERTS = "decoder.layers.mlp.experts.linear_fc2.weight"
NORM = "decoder.layers.input_layernorm.weight"
# Fault: the array and the elements that the error names, and what is wrong with them.
FAULTS = {
    "complete": "",
    "expert on no rank": f"'{EXPERTS}': elements [2:4, 4:8, 0:32, 0:16] are {{}} by no rank",
    "expert on two ranks": f"'{EXPERTS}': elements [2:4, 0:4, 0:32, 0:16] are {{}} by more than one main "
    f"replica (ranks 2, 3)",
    "layer on no stage": f"'{EXPERTS}': elements [2:3, 0:8, 0:32, 0:16] are {{}} by no rank",
    "layer on two stages": f"'{NORM}': elements [2:3, 0:32] are {{}} by more than one main replica "
    f"(ranks 0, 2)",
}


def declare(rank: int, stages: str = TABLE) -> dict[str, Any]:
    """Return what a rank declares of the model and its optimizer, with a stage table of its own."""
    groups = ParallelGroups.offline(LAYOUT, rank)
    model = build(Case(LAYOUT, stages=stages), ALL_MOE, groups, seed=1)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), groups)
    return state_of(model, optimizer)


def declare_wrongly(fault: str, rank: int) -> dict[str, Any]:
    """Return what a rank declares of a model that has a fault."""
    if fault == "expert on two ranks" and rank == 3:
        return declare(2)
    if fault == "layer on no stage" and rank >= 2:
        return declare(rank, STALE)
    if fault == "layer on two stages" and rank < 2:
        return declare(rank, STALE)
    state = declare(rank)
    if fault == "expert on no rank" and rank == 3:
        state["model"] = {name: e for name, e in state["model"].items() if ".mlp.experts." not in name}
    return state


def save(fault: str, directory: Path) -> str:
    """Save, and return the text of the error; empty without one."""
    state = declare_wrongly(fault, torch.distributed.get_rank())
    try:
        megackpt.save(state, directory)
    except CoverageError as error:
        return str(error)
    return ""


def load(fault: str, directory: Path) -> str:
    """Load, and return the text of the error, after which every tensor is as it was."""
    state = declare_wrongly(fault, torch.distributed.get_rank())
    tensors = [tensor.data for tensor in tensors_of(state)]
    before = [data.detach().clone() for data in tensors]
    try:
        megackpt.load(state, directory, options=LoadOptions(complete=True))
    except CoverageError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        return str(error)
    assert not all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    return ""


@pytest.fixture(scope="module")
def complete(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the complete model with other weights, from one rank."""
    path = tmp_path_factory.mktemp("complete") / "checkpoint"
    rank_pool.run(save_on_one_rank, 1, path)
    return path


def save_on_one_rank(path: Path) -> None:
    groups = ParallelGroups.create(ParallelLayout())
    model = build(Case(groups.layout), ALL_MOE, groups, seed=9)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), groups)
    megackpt.save(state_of(model, optimizer), path)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_on_no_rank_or_on_two_is_named_before_anything_is_written_or_loaded(
    rank_pool: RankPool, tmp_path: Path, complete: Path, fault: str
) -> None:
    texts = set(rank_pool.run(save, LAYOUT.world_size, fault, tmp_path / "new"))
    assert len(texts) == 1
    assert FAULTS[fault].format("saved") in texts.pop()
    if fault != "complete":
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    texts = set(rank_pool.run(load, LAYOUT.world_size, fault, complete))
    assert len(texts) == 1
    text = texts.pop()
    assert FAULTS[fault].format("requested") in text
    assert bool(text) == (fault != "complete")
