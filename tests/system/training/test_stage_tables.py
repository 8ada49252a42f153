"""Layers and experts that are on no rank or on two, and stale stage tables.

A save and a complete load end in the same error on every rank, before anything is written or loaded. Two
pipeline stages with two data-parallel ranks each, between which experts are divided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megackpt
from megackpt import LoadOptions, load_common_state_dict
from megackpt.errors import CheckpointError
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import LayerStack, ModelChunks, ParallelGroups, ParallelLayout, StageTable
from models import build_gpt, init_weights
from tests.support.gpt import ALL_MOE, SMALL_GPT, Case, build, state_of
from tests.support.optimizers import tensors_of

LAYOUT = ParallelLayout(pp=2, dp=2)
COMPLETE = LoadOptions(complete=True)
LAYERS = 4
TABLE, STALE = "Ett|ttL", "Ettt|tL"

Owned = tuple[tuple[int, ...], tuple[int, ...]]
GOOD: Owned = ((0, 1), (2, 3))
ABSENT_LAYER: Owned = ((0,), (2, 3))


def layer(_: int) -> nn.Module:
    return nn.Linear(3, 2, bias=False)


def own_stack(owned: Owned, groups: ParallelGroups, *, homogeneous: bool) -> nn.Module:
    """Return a stack of a user who computes the layers of each stage without a table."""
    total = max(map(max, owned)) + 1
    stack = LayerStack(layer, owned[groups.pp.rank], total, groups, homogeneous=homogeneous)
    for param in stack.parameters():
        nn.init.constant_(param, -1.0)
    return stack


def load_stack(owned: Owned, homogeneous: bool, directory: Path) -> tuple[str, str]:
    groups = ParallelGroups.create(LAYOUT)
    stack = own_stack(owned, groups, homogeneous=homogeneous)
    outcome = outcome_of(
        lambda: megackpt.load(stack.sharded_state_dict("layers."), directory, options=COMPLETE)
    )
    # The checkpoint has random weights.
    assert all(bool((p == -1).all()) == (outcome[0] != "") for p in stack.parameters())
    return outcome


def outcome_of(function: Any) -> tuple[str, str]:
    """Return the class and the text of the error that a function raises, or empty texts."""
    try:
        function()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


def error_of(outcomes: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the error, which is the same on all ranks."""
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Checkpoints of four layers with random weights: as a stack, and with keys of their own."""
    groups = ParallelGroups.create(ParallelLayout())
    directories = {}
    for homogeneous in (True, False):
        directories[homogeneous] = tmp_path_factory.mktemp("stored") / str(homogeneous)
        whole = LayerStack(layer, range(LAYERS), LAYERS, groups, homogeneous=homogeneous)
        megackpt.save(whole.sharded_state_dict("layers."), directories[homogeneous])
    return directories


MISMATCH = "'layers.weight': stored as float32 (4, 2, 3), asked for as float32 ({}, 2, 3)"


@pytest.mark.parametrize(
    ("owned", "homogeneous", "kind", "text"),
    [
        (GOOD, True, "", ""),
        (GOOD, False, "", ""),
        (ABSENT_LAYER, False, "MissingKeyError", "'layers.1.weight'"),
        (((0, 1), (2,)), True, "MismatchError", MISMATCH.format(3)),
        (((0, 1), (2,)), False, "MissingKeyError", "'layers.3.weight'"),
        (((0, 1), (2, 3, 4)), True, "MismatchError", MISMATCH.format(5)),
        (((0, 1), (2, 3, 4)), False, "MissingKeyError", "'layers.4.weight'"),
    ],
)
def test_layers_are_loaded_if_as_many_are_stored_and_otherwise_named(
    rank_pool: RankPool, stored: dict[bool, Path], owned: Owned, homogeneous: bool, kind: str, text: str
) -> None:
    error = error_of(rank_pool.run(load_stack, 4, owned, homogeneous, stored[homogeneous]))
    assert error[0] == kind
    assert text in error[1]


def gpt_state(tables: tuple[str, str], *, with_table: bool) -> tuple[ModelChunks, dict[str, Any]]:
    """Return a GPT on two stages; data-parallel rank 1 has the second table."""
    groups = ParallelGroups.create(LAYOUT)
    table = StageTable.from_string(tables[groups.dp.rank], pp=2)
    model = build_gpt(SMALL_GPT, groups, stages=table)
    init_weights(model, seed=1)
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    return model, state | ({"stages": table.to_json()} if with_table else {})


def save_gpt(tables: tuple[str, str], with_table: bool, directory: Path) -> tuple[str, str]:
    _, state = gpt_state(tables, with_table=with_table)
    return outcome_of(lambda: megackpt.save(state, directory))


def load_gpt(tables: tuple[str, str], directory: Path) -> tuple[str, str]:
    model, state = gpt_state(tables, with_table=True)
    before = [param.detach().clone() for param in model.parameters()]
    outcome = outcome_of(lambda: megackpt.load(state, directory, options=COMPLETE))
    if outcome[0]:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return outcome


def test_ranks_with_different_tables_are_named(rank_pool: RankPool, tmp_path: Path) -> None:
    tables = (TABLE, STALE)
    kind, text = error_of(rank_pool.run(save_gpt, 4, tables, True, tmp_path / "new"))
    assert kind == "CommonStateError"
    assert "'stages.layout' on rank(s) 1, 3" in text
    assert not list((tmp_path / "new").glob("**/*.safetensors"))

    assert error_of(rank_pool.run(save_gpt, 4, (TABLE, TABLE), True, tmp_path / "good")) == ("", "")
    assert load_common_state_dict(tmp_path / "good")["stages"] == {"layout": TABLE, "pp": 2}
    kind, text = error_of(rank_pool.run(load_gpt, 4, tables, tmp_path / "good"))
    assert kind == "CommonStateError"
    assert "'stages.layout' on rank(s) 1, 3" in text
    assert error_of(rank_pool.run(load_gpt, 4, ("E|ttttL",) * 2, tmp_path / "good")) == ("", "")


MOE_LAYOUT = ParallelLayout(pp=2, dp=2, ep=2)
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


def trained(case: Case, groups: ParallelGroups, seed: int) -> dict[str, Any]:
    """Return what this rank declares of the model and its optimizer."""
    model = build(case, ALL_MOE, groups, seed=seed)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), groups)
    return state_of(model, optimizer)


def declare(rank: int, stages: str = TABLE) -> dict[str, Any]:
    """Return what a rank declares with a stage table of its own."""
    groups = ParallelGroups.offline(MOE_LAYOUT, rank)
    return trained(Case(MOE_LAYOUT, stages=stages), groups, seed=1)


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


def save_moe(fault: str, directory: Path) -> tuple[str, str]:
    state = declare_wrongly(fault, torch.distributed.get_rank())
    return outcome_of(lambda: megackpt.save(state, directory))


def load_moe(fault: str, directory: Path) -> tuple[str, str]:
    state = declare_wrongly(fault, torch.distributed.get_rank())
    tensors = [tensor.data for tensor in tensors_of(state)]
    before = [data.detach().clone() for data in tensors]
    outcome = outcome_of(lambda: megackpt.load(state, directory, options=COMPLETE))
    assert all(map(torch.equal, before, tensors)) == (outcome[0] != "")
    return outcome


@pytest.fixture(scope="module")
def complete(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the complete model with other weights, from one rank."""
    path = tmp_path_factory.mktemp("complete") / "checkpoint"
    rank_pool.run(save_on_one_rank, 1, path)
    return path


def save_on_one_rank(path: Path) -> None:
    groups = ParallelGroups.create(ParallelLayout())
    megackpt.save(trained(Case(groups.layout), groups, seed=9), path)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_on_no_rank_or_on_two_is_named_before_anything_is_written_or_loaded(
    rank_pool: RankPool, tmp_path: Path, complete: Path, fault: str
) -> None:
    kind = "" if fault == "complete" else "CoverageError"
    acts = ((save_moe, tmp_path / "new", "saved"), (load_moe, complete, "requested"))
    for act, location, doing in acts:
        error = error_of(rank_pool.run(act, 4, fault, location))
        assert error[0] == kind
        assert FAULTS[fault].format(doing) in error[1]
    assert fault == "complete" or [path for path in tmp_path.rglob("*") if path.is_file()] == []
